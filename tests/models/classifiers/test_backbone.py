"""The whole classifier: normalization inside, parts that fit, and the gradient that a client releases."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lit_recon.clients.gradient import GradientOperator
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models import MLP, Backbone, ConvNet, LeNet, ResNet18, WideFeatureLayer
from lit_recon.records import Batch, Differentiable, Normalization, Weights

NORMALIZATION = Normalization((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
SHAPE = (3, 8, 8)


def with_feature_layer(norm: str = "batch") -> Backbone:
    trunk = ConvNet(SHAPE, widths=[4, 6], norm=norm)  # type: ignore[arg-type]  # names in a table
    return Backbone(trunk, 4, NORMALIZATION, WideFeatureLayer(trunk.out_features, 12, 5, "gelu"))


MODELS: dict[str, Callable[[], Backbone]] = {
    "resnet-batch": lambda: Backbone(ResNet18(SHAPE, width=4), 4, NORMALIZATION),
    "resnet-group-elu": lambda: Backbone(ResNet18(SHAPE, "group", "elu", width=4), 4, NORMALIZATION),
    "convnet": lambda: Backbone(ConvNet(SHAPE, [4, 6]), 4, NORMALIZATION),
    "lenet": lambda: Backbone(LeNet(SHAPE), 4, NORMALIZATION),
    "mlp": lambda: Backbone(MLP(SHAPE, [9, 7]), 4, NORMALIZATION),
    "feature-layer": with_feature_layer,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Backbone:
    torch.manual_seed(0)
    return MODELS[request.param]().double()


def some_batch(n: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, *SHAPE, generator=generator, dtype=torch.float64), torch.arange(n) % 4


def test_parts_in_the_order_of_an_image(model: Backbone) -> None:
    images, _ = some_batch()
    model.eval()
    channels = zip(images.unbind(1), NORMALIZATION.mean, NORMALIZATION.std, strict=True)
    normalized = torch.stack([(channel - mean) / std for channel, mean, std in channels], dim=1)
    features = model.trunk(normalized)
    torch.testing.assert_close(model.features(images), features, rtol=1e-5, atol=1e-6)
    neurons = features if model.feature_layer is None else model.feature_layer(features)
    logits = neurons @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(images), logits, rtol=1e-5, atol=1e-6)
    assert logits.shape == (3, 4)


def test_normalization_is_no_state(model: Backbone) -> None:
    assert not [name for name in model.state_dict() if "pixel" in name or "normalization" in name]
    assert not [name for name, _ in model.named_parameters() if "pixel" in name]


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
def test_the_operators_gradient_is_autograds(model: Backbone, batch_norm: str) -> None:
    images, labels = some_batch()
    operator = GradientOperator(model, batch_norm)  # type: ignore[arg-type]  # names in a table
    update = operator(copy.deepcopy(Weights.of(model)), Batch(images, labels))
    model.eval().requires_grad_(True)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train(batch_norm == "train")
    nn.functional.cross_entropy(model(images), labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(update[name], parameter.grad, msg=name)


def test_the_gradient_matching_loss_has_the_slope_of_finite_differences(model: Backbone) -> None:
    """Double backward through the whole network, against central differences of the gradient's norm."""
    images, labels = some_batch(2)
    operator = GradientOperator(model, "eval")

    def size(candidate: Tensor, differentiable: Differentiable = "no") -> Tensor:
        update = operator(Weights.of(model), Batch(candidate, labels), differentiable)
        return torch.stack([value.square().sum() for value in update.values()]).sum()

    leaf = images.clone().requires_grad_()
    (slope,) = torch.autograd.grad(size(leaf, "autograd"), leaf)
    direction = torch.randn(images.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step = 1e-6
    difference = (size(images + step * direction) - size(images - step * direction)) / (2 * step)
    # ReLU networks are smooth almost everywhere: a kink within one step would be a coincidence
    torch.testing.assert_close((slope * direction).sum(), difference.detach(), rtol=1e-4, atol=1e-7)


def test_a_clients_update_holds_the_gradient_of_the_random_rows() -> None:
    torch.manual_seed(0)
    model = with_feature_layer().double()
    images, labels = some_batch()
    update = GradientOperator(model)(Weights.of(model), Batch(images, labels))
    gradient = update["feature_layer.random.weight"]
    assert gradient.shape == (7, model.trunk.out_features)
    assert torch.linalg.matrix_rank(gradient) == 3
    assert model.feature_layer is not None
    directions = model.feature_layer.directions(model.eval().features(images))
    coordinates = torch.linalg.lstsq(directions.T, gradient.T).solution
    torch.testing.assert_close(directions.T @ coordinates, gradient.T)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 1, 8, 8), (2, 3, 8, 9)])
def test_images_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"images must be \(n, 3, 8, 8\)"):
        MODELS["mlp"]()(torch.zeros(shape))


def test_parts_that_do_not_fit() -> None:
    trunk = MLP(SHAPE, [9])
    with pytest.raises(ShapeError, match="normalization has 1 channels"):
        Backbone(trunk, 4, Normalization((0.5,), (0.2,)))
    with pytest.raises(ShapeError, match="build it with in_features=9"):
        Backbone(trunk, 4, NORMALIZATION, WideFeatureLayer(8, 12, 4))
    with pytest.raises(ConfigError, match="at least 2 classes"):
        Backbone(trunk, 1, NORMALIZATION)
