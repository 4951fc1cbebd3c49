"""Any module from images to logits can be a client's model, and any loss of logits and labels its loss."""

from __future__ import annotations

import copy
from collections.abc import Callable

import lit_recon._torchvision

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from lit_recon.attacks.updates import (
    AnalyticInversion,
    FirstApplicable,
    GradientMatching,
    HeadCounts,
    KnownLabels,
    SquaredError,
)
from lit_recon.clients import Client, ClientSettings, GradientOperator, LocalSteps, LocalTraining, SecureAggregation
from lit_recon.clients.gradient import checked_loss
from lit_recon.defenses import DPSGD, GradientPruning, MixUp
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.models import MLP, Backbone
from lit_recon.records import Batch, Knowledge, Normalization

SHAPE = (3, 32, 32)
LOGITS = torch.empty(0)
COLOR = Normalization((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def torchvision_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    class Narrow(ResNet):
        def _make_layer(self, block, planes, blocks, stride=1, dilate=False):  # type: ignore[no-untyped-def]
            return super()._make_layer(block, max(4, planes // 32), blocks, stride, dilate)

    network = Narrow(BasicBlock, [1, 1, 1, 1], num_classes=5)
    network.fc = nn.Linear(16, 5)
    return network


class Residual(nn.Module):
    """BatchNorm and activation in one layer, in-place operations, and a parameter without influence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, stride=4), BatchNormAct2d(4)
        self.second, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 5)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, images: Tensor) -> Tensor:
        maps = self.norm(self.first(images))
        more = self.second(maps)
        more += maps
        nn.functional.elu_(more)
        logits: Tensor = self.head(more.mean((2, 3)))
        return logits


class Encoder(nn.Module):
    """PyTorch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 8, 16, stride=16), nn.Linear(8, 5)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.patches(images).flatten(2).mT).mean(1))
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchvision": torchvision_resnet,
    "timm": lambda: timm.create_model("resnet10t", num_classes=5),
    "in place": Residual,
    "attention": lambda: timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=32, depth=1, embed_dim=48),
    "encoder": Encoder,
    "sequential": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5, bias=False)),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    made = MODELS[request.param]()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics that a wrong formula cannot survive
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    return made


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.tensor([4, 1])


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_update_is_that_of_backward(model: nn.Module, mode: str, batch: tuple[Tensor, Tensor]) -> None:
    before = copy.deepcopy(model.state_dict())
    client = Client(model, mode, image_shape=SHAPE, normalization=COLOR)
    seen = client.observe(*batch, Knowledge(labels=True, batch_norm="batch"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    reference = copy.deepcopy(model).train(mode == "train")
    for module in reference.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    mean, std = COLOR.tensors(batch[0])
    nn.functional.cross_entropy(reference((batch[0] - mean) / std), batch[1]).backward()
    assert list(seen.update) == [name for name, _ in model.named_parameters()]
    for name, value in reference.named_parameters():
        expected = torch.zeros_like(value) if value.grad is None else value.grad
        torch.testing.assert_close(seen.update[name], expected, rtol=2e-3, atol=2e-5)
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert seen.batch_statistics is not None
    assert list(seen.batch_statistics) == norms
    assert (seen.image_shape, seen.normalization, seen.n_classes) == (SHAPE, COLOR, 5)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_simulated_update_is_differentiable_by_both_engines(
    model: nn.Module, mode: str, batch: tuple[Tensor, Tensor]
) -> None:
    seen = Client(model, mode, image_shape=SHAPE).observe(*batch)

    def distance(images: Tensor, functional: bool) -> Tensor:
        update = seen.operator(seen.weights, Batch(images, batch[1]), "functional" if functional else "autograd")
        return torch.stack([value.square().sum() for value in update.values()]).sum()

    images = batch[0].clone().requires_grad_()
    (eager,) = torch.autograd.grad(distance(images, False), images)
    functional = torch.func.grad(lambda x: distance(x, True))(batch[0])
    torch.testing.assert_close(functional, eager, rtol=1e-3, atol=1e-5 * float(eager.abs().max()))
    together = torch.func.vmap(torch.func.grad(lambda x: distance(x, True)))(batch[0][None])
    torch.testing.assert_close(together[0], eager, rtol=1e-3, atol=1e-5 * float(eager.abs().max()))


def test_running_statistics_can_be_hidden(batch: tuple[Tensor, Tensor]) -> None:
    seen = Client(Residual(), "train", image_shape=SHAPE).observe(*batch, Knowledge(batch_norm="none"))
    simulated = seen.operator(seen.weights, Batch(*batch))
    for name, value in seen.update.items():
        torch.testing.assert_close(simulated[name], value)


@pytest.mark.parametrize("normalization", [COLOR, None], ids=["normalized", "plain"])
@pytest.mark.parametrize(
    ("of_model", "of_images"), [(torch.float64, torch.float32), (torch.float32, torch.float64)], ids=str
)
def test_images_are_taken_in_the_precision_of_the_model(
    of_model: torch.dtype, of_images: torch.dtype, normalization: Normalization | None, batch: tuple[Tensor, Tensor]
) -> None:
    client = Client(Residual().to(of_model), image_shape=SHAPE, normalization=normalization)
    seen = client.observe(batch[0].to(of_images), batch[1], Knowledge(labels=True))
    assert {value.dtype for value in seen.update.values()} == {of_model}
    found = GradientMatching(steps=2, labels=KnownLabels())(seen)
    assert found.images.isfinite().all()


@pytest.mark.parametrize("defense", [DPSGD(1.0, 0.5), GradientPruning(0.5), MixUp()])
def test_defenses_work_on_any_module(defense: object, batch: tuple[Tensor, Tensor]) -> None:
    client = Client(torchvision_resnet(), defense=defense, image_shape=SHAPE)  # type: ignore[arg-type]  # a Defense
    assert all(value.isfinite().all() for value in client.release(*batch).update.values())


def squared(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean squared distance to one-hot labels."""
    return (logits - nn.functional.one_hot(labels, logits.shape[1])).square().mean()


def test_every_rule_uses_the_loss(batch: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    model = Residual()
    expected = Client(model, image_shape=SHAPE, loss=squared).release(*batch).update
    leaves = {name: value.detach().requires_grad_() for name, value in model.named_parameters()}
    loss = squared(torch.func.functional_call(model.eval(), leaves, (batch[0],)), batch[1])
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    for value, gradient in zip(expected.values(), gradients, strict=True):
        torch.testing.assert_close(value, gradient, rtol=1e-4, atol=1e-6)
    rules = {
        "steps": lambda m, mode, loss: LocalSteps(m, 1, batch_norm=mode, loss=loss),
        "clients": lambda m, mode, loss: SecureAggregation(GradientOperator(m, mode, loss), 2),
    }
    for rule in rules.values():
        released = Client(model, rule=rule, image_shape=SHAPE, loss=squared).release(*batch).update
        for name, value in released.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)
    settings = ClientSettings(local_steps=LocalTraining(steps=1), n_clients=2, loss=squared)
    mlp = Backbone(MLP(SHAPE, [4]), 5, COLOR)
    plain = ClientSettings(loss=squared).client(mlp).release(*batch).update
    for name, value in settings.client(mlp).release(*batch).update.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logits, labels: logits.sum(1), r"must return one number .*; got a tensor of shape \(2,\)"),
        (lambda logits, labels: 0.5, "got float"),
        (lambda logits, labels: logits.detach().sum(), "differentiable in the logits"),
        (nn.functional.mse_loss, r"mse_loss fails on logits \(2, 5\) and labels that are classes \(2,\): .*callable"),
        (lambda logits: logits.sum(), "positional argument"),
        (nn.functional.multi_margin_loss, "differentiate the loss twice, and multi_margin_loss cannot be"),
        (nn.CrossEntropyLoss(reduction="sum"), "must be the mean of the losses of single examples; it is .* sums"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1, 2, 1, 1])), "must be the mean .* leave weights of classes"),
        (nn.CrossEntropyLoss(ignore_index=3), "must be the mean .* have the mean nan"),
        (lambda logits, labels: logits[1].square().sum(), "fails on a batch of 5 examples or on a single one: index 1"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Client(Residual(), image_shape=SHAPE, loss=loss)


def test_the_loss_of_many_classes_is_checked_on_some_of_them() -> None:
    weights = torch.ones(2000)
    weights[::2] = 1.5
    assert checked_loss(smooth := nn.CrossEntropyLoss(label_smoothing=0.1), 2000, LOGITS) is smooth
    with pytest.raises(ConfigError, match="must be the mean .* for 100 examples"):
        checked_loss(nn.CrossEntropyLoss(weight=weights), 2000, LOGITS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_loss_with_tensors_is_tried_as_the_model_is(dtype: torch.dtype, batch: tuple[Tensor, Tensor]) -> None:
    model = Residual().to(dtype)
    client = Client(model, image_shape=SHAPE, loss=nn.CrossEntropyLoss(weight=torch.ones(5, dtype=dtype)))
    assert all(value.isfinite().all() for value in client.release(*batch).update.values())
    with pytest.raises(ConfigError, match=f"CrossEntropyLoss fails .*, here {dtype} on meta, that returns their mean"):
        client.to("meta")
    other = torch.float64 if dtype == torch.float32 else torch.float32
    with pytest.raises(ConfigError, match=f"CrossEntropyLoss fails .*, here {dtype} on cpu, that returns their mean"):
        Client(model, image_shape=SHAPE, loss=nn.CrossEntropyLoss(weight=torch.ones(5, dtype=other)))


def test_a_sum_over_probabilities_is_refused() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels, reduction="mean" if labels.dim() == 1 else "sum")

    assert checked_loss(loss, 5, LOGITS) is loss
    with pytest.raises(ConfigError, match="the loss loss must be the mean"):
        checked_loss(loss, 5, LOGITS, probabilities=True)


def test_the_default_loss_as_an_object_is_the_default_loss(batch: tuple[Tensor, Tensor]) -> None:
    seen = Client(Residual(), image_shape=SHAPE, loss=nn.CrossEntropyLoss()).observe(*batch)
    assert seen.loss is nn.functional.cross_entropy
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert Client(Residual(), image_shape=SHAPE, loss=smooth).observe(*batch).loss is smooth


def test_gradient_matching_needs_no_cross_entropy(batch: tuple[Tensor, Tensor]) -> None:
    seen = Client(Residual(), image_shape=SHAPE, loss=squared).observe(*batch, Knowledge(labels=True))
    for labels in (KnownLabels(), HeadCounts()):
        attack = GradientMatching(objective=SquaredError(), labels=labels, steps=2)
        assert attack(seen).images.shape == batch[0].shape
    hidden = Client(Residual(), image_shape=SHAPE, loss=squared).observe(*batch)
    with pytest.raises(ThreatModelError, match="HeadCounts assumes .* their loss is squared"):
        GradientMatching(steps=2)(hidden)


def test_a_layer_that_a_model_lacks_is_named(batch: tuple[Tensor, Tensor]) -> None:
    one = batch[0][:1], batch[1][:1]
    seen = Client(Residual(), image_shape=SHAPE).observe(*one, Knowledge(labels=True))
    with pytest.raises(UnsupportedModelError, match="fully connected layer .*; Residual has none"):
        AnalyticInversion(KnownLabels()).check([seen])
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5, bias=False))
    seen = Client(flat, image_shape=SHAPE).observe(*one, Knowledge(labels=True))
    with pytest.raises(UnsupportedModelError, match="gradient of a bias.*layer '1' of Sequential has none"):
        AnalyticInversion(KnownLabels()).check([seen])
    both = FirstApplicable([AnalyticInversion(), GradientMatching(steps=1, labels=KnownLabels())])
    assert "layer '1' of Sequential has none" in both(seen).notes[0]
