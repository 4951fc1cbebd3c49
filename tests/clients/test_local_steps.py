"""Local training, against a plain loop of torch.optim.SGD."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from lit_recon.clients import GradientOperator
from lit_recon.clients.local_steps import LocalSteps, Optimizer
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models import MLP, Backbone, ConvNet
from lit_recon.records import Batch, Normalization, Update, Weights

SHAPE = (1, 6, 6)
GREY = Normalization((0.5,), (0.25,))


@pytest.fixture
def model() -> Backbone:
    torch.manual_seed(0)
    return Backbone(ConvNet(SHAPE, widths=[4, 6], norm="group", activation="gelu"), 5, GREY).double()


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.rand(6, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return images, torch.tensor([4, 0, 2, 1, 1, 3])


def sgd(
    model: Backbone, images: torch.Tensor, labels: torch.Tensor, steps: int, batches: int, momentum: float, lrs: dict
) -> Update:
    trained = copy.deepcopy(model)
    groups = [{"params": trained.trunk.parameters(), "lr": lrs["trunk"]}]
    groups.append({"params": trained.head.parameters(), "lr": lrs["head"]})
    optimizer = torch.optim.SGD(groups, momentum=momentum)
    size = len(images) // batches
    for step in range(steps):
        part = slice(step % batches * size, (step % batches + 1) * size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(images[part]), labels[part]).backward()
        optimizer.step()
    return {name: value.detach() for name, value in trained.named_parameters()}


@pytest.mark.parametrize(("steps", "batches"), [(1, 1), (3, 1), (5, 1), (4, 2), (7, 3)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("head_lr", [0.1, 0.03])
def test_equals_a_plain_training_loop_bit_for_bit(
    model: Backbone, batch: tuple, steps: int, batches: int, momentum: float, head_lr: float
) -> None:
    expected = sgd(model, *batch, steps, batches, momentum, {"trunk": 0.1, "head": head_lr})
    layer_lrs = {"head": head_lr} if head_lr != 0.1 else None
    operator = LocalSteps(model, steps, 0.1, momentum, layer_lrs, batches, release="difference")
    trained = operator.train(Weights.of(model), Batch(*batch))
    update = operator(Weights.of(model), Batch(*batch))
    for name, value in expected.items():
        assert torch.equal(trained[name], value), name
        assert torch.equal(update[name], Weights.of(model).parameters[name] - value), name


def test_one_step_is_the_gradient(model: Backbone, batch: tuple) -> None:
    update = LocalSteps(model, 1, 0.1, 0.9)(Weights.of(model), Batch(*batch))
    for name, value in GradientOperator(model)(Weights.of(model), Batch(*batch)).items():
        torch.testing.assert_close(update[name], value, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    ("steps", "batches", "momentum", "largest"),
    [(1, 1, 0.9, 1.0), (4, 2, 0.0, 1.0), (3, 2, 0.0, 4 / 3), (5, 4, 0.0, 8 / 5), (2, 2, 0.5, 1.5 / 1.25)],
)
def test_images_of_some_mini_batches_count_more(
    model: Backbone, steps: int, batches: int, momentum: float, largest: float
) -> None:
    assert LocalSteps(model, steps, 0.1, momentum, None, batches).largest_weight == pytest.approx(largest)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_short_steps_release_nearly_the_gradient(model: Backbone, batch: tuple, momentum: float) -> None:
    update = LocalSteps(model, 4, 1e-6, momentum, {"trunk.layers.0": 1e-7})(Weights.of(model), Batch(*batch))
    for name, value in GradientOperator(model)(Weights.of(model), Batch(*batch)).items():
        torch.testing.assert_close(update[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("steps", "batches"), [(1, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("head_lr", [0.1, 0.03])
def test_adam_equals_that_of_pytorch_bit_for_bit(
    model: Backbone, batch: tuple, steps: int, batches: int, head_lr: float
) -> None:
    trained = copy.deepcopy(model)
    groups = [{"params": trained.trunk.parameters(), "lr": 0.1}, {"params": trained.head.parameters(), "lr": head_lr}]
    optimizer = torch.optim.Adam(groups)
    size = 6 // batches
    for step in range(steps):
        part = slice(step % batches * size, (step % batches + 1) * size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(trained(batch[0][part]), batch[1][part]).backward()
        optimizer.step()
    layer_lrs = {"head": head_lr} if head_lr != 0.1 else None
    operator = LocalSteps(model, steps, 0.1, 0.0, layer_lrs, batches, optimizer="adam")
    found = operator.train(Weights.of(model), Batch(*batch))
    for name, value in trained.named_parameters():
        assert torch.equal(found[name], value), name
    update = operator(Weights.of(model), Batch(*batch))
    for name, value in trained.named_parameters():
        rate = steps * (head_lr if name.startswith("head") else 0.1)
        torch.testing.assert_close(update[name], (Weights.of(model).parameters[name] - value) / rate)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_frozen_parameters_stay_as_they_are(model: Backbone, batch: tuple, optimizer: Optimizer) -> None:
    frozen = [name for name, _ in model.named_parameters() if not name.startswith("head")]
    trained = copy.deepcopy(model)
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    by_hand = kind(trained.head.parameters(), lr=0.1)
    for _ in range(3):
        by_hand.zero_grad()
        nn.functional.cross_entropy(trained(batch[0]), batch[1]).backward()
        by_hand.step()
    operator = LocalSteps(model, 3, 0.1, optimizer=optimizer, frozen=frozen)
    found = operator.train(Weights.of(model), Batch(*batch))
    for name, value in trained.named_parameters():
        assert torch.equal(found[name], value), name
    seen = operator(Weights.of(model), Batch(*batch), "autograd")
    assert not any(seen[name].any() for name in frozen)


def test_an_attack_sees_smoother_steps_of_adam(model: Backbone, batch: tuple) -> None:
    operator = LocalSteps(model, 1, 0.1, optimizer="adam")
    exact, smooth = (operator(Weights.of(model), Batch(*batch), form) for form in ("no", "autograd"))
    gradient = GradientOperator(model)(Weights.of(model), Batch(*batch))
    for name, value in gradient.items():
        torch.testing.assert_close(exact[name], value / (value.abs() + 1e-8), rtol=1e-6, atol=1e-9)
        expected = value / (value.square() + 0.01 * value.square().mean()).sqrt()
        torch.testing.assert_close(smooth[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("momentum", "optimizer"), [(0.0, "sgd"), (0.9, "sgd"), (0.0, "adam")])
def test_derivative_in_the_images(
    model: Backbone, batch: tuple, momentum: float, optimizer: Optimizer, checkpointing: bool
) -> None:
    operator = LocalSteps(model, 3, 0.5, momentum, batches=2, checkpointing=checkpointing, optimizer=optimizer)
    images, labels = batch[0][:2], batch[1][:2]

    def matching(images: torch.Tensor) -> torch.Tensor:
        update = operator(Weights.of(model), Batch(images, labels), "autograd")
        return torch.stack([value.square().sum() for value in update.values()]).sum()

    assert torch.autograd.gradcheck(matching, images.clone().requires_grad_())


@pytest.mark.parametrize(("momentum", "optimizer"), [(0.0, "sgd"), (0.9, "sgd"), (0.0, "adam")])
def test_checkpointing_changes_nothing_but_memory(
    model: Backbone, batch: tuple, momentum: float, optimizer: Optimizer
) -> None:
    labels = torch.nn.functional.one_hot(batch[1], 5).double()
    results = []
    for checkpointing in (False, True):
        operator = LocalSteps(model, 3, 0.5, momentum, checkpointing=checkpointing, optimizer=optimizer)
        leaves = [batch[0].clone().requires_grad_(), labels.clone().requires_grad_()]
        update = operator(Weights.of(model), Batch(*leaves), "autograd")
        loss = torch.stack([value.square().sum() for value in update.values()]).sum()
        results.append([*update.values(), *torch.autograd.grad(loss, leaves)])
    for plain, again in zip(*results, strict=True):
        # Adam divides by small numbers
        rtol, atol = (1e-12, 1e-15) if optimizer == "sgd" else (1e-9, 1e-12)
        torch.testing.assert_close(again, plain, rtol=rtol, atol=atol)


def test_checkpointing_keeps_no_graph_of_a_step(model: Backbone, batch: tuple) -> None:
    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value
            alive.add(self)

    alive: weakref.WeakSet[Box] = weakref.WeakSet()

    def saved(checkpointing: bool) -> int:
        """Numbers that the graph of the update holds, of all distinct tensors together."""
        operator = LocalSteps(model, 8, 0.1, checkpointing=checkpointing)
        images = batch[0].clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.value):
            update = operator(Weights.of(model), Batch(images, batch[1]), "autograd")
        gc.collect()
        held = sum({box.value.data_ptr(): box.value.numel() for box in alive}.values())
        del update
        return held

    # in this order: hooks that keep what an operation returned make cycles, which nobody collects
    checkpointed, plain = saved(True), saved(False)
    assert 0 < checkpointed < plain / 3


def test_functional_form_agrees_alone_and_under_vmap(model: Backbone, batch: tuple) -> None:
    operator = LocalSteps(model, 3, 0.1, 0.9, batches=3)
    eager = operator(Weights.of(model), Batch(*batch))
    both = torch.stack([batch[0], batch[0].flip(3)])
    candidates = Batch(both, torch.stack([batch[1], batch[1]]))
    together = torch.func.vmap(lambda candidate: operator(Weights.of(model), candidate, "functional"))(candidates)
    for name, value in eager.items():
        torch.testing.assert_close(together[name][0], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_statistics_are_those_of_all_images(mode: str, batch: tuple) -> None:
    torch.manual_seed(0)
    model = Backbone(ConvNet(SHAPE, widths=[4, 6]), 5, GREY).double()
    operator = LocalSteps(model, 2, 0.1, batches=2, batch_norm=mode)
    update, statistics = operator.with_statistics(Weights.of(model), Batch(*batch))
    _, expected = GradientOperator(model, mode).with_statistics(Weights.of(model), Batch(*batch))
    plain = operator(Weights.of(model), Batch(*batch))
    assert all(torch.equal(value, plain[name]) for name, value in update.items())
    assert statistics.keys() == expected.keys()
    alone = operator.statistics(Weights.of(model), Batch(*batch))
    for found in (statistics, alone):
        assert all(torch.equal(found[name].mean, layer.mean) for name, layer in expected.items())


def test_nothing_is_changed(model: Backbone, batch: tuple) -> None:
    before = copy.deepcopy(model.state_dict())
    LocalSteps(model, 3, 0.1, 0.9)(Weights.of(model), Batch(*batch))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_longest_prefix_decides() -> None:
    model = Backbone(MLP(SHAPE, [4]), 5, GREY)
    rates = LocalSteps(model, layer_lrs={"trunk": 0.2, "trunk.layers.0.bias": 0.3}).rates
    assert rates == {
        "trunk.layers.0.weight": 0.2,
        "trunk.layers.0.bias": 0.3,
        "head.weight": 0.01,
        "head.bias": 0.01,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps >= 1"),
        ({"steps": 2, "batches": 3}, "batches <= steps"),
        ({"batches": 0}, "batches <= steps"),
        ({"momentum": 1.0}, "usual value is 0.9"),
        ({"release": "weights"}, "'difference'"),
        ({"optimizer": "lamb"}, "'sgd' or 'adam'; got 'lamb'"),
        ({"optimizer": "adam", "momentum": 0.9}, "no momentum"),
        ({"lr": 0.0}, "all layers; got 0"),
        ({"layer_lrs": {"head": -1.0}}, "for head; got -1"),
        ({"layer_lrs": {"tail": 1.0}}, r"\['tail'\]"),
        ({"layer_lrs": {"hea": 1.0}}, r"\['hea'\]"),
    ],
)
def test_bad_settings_are_refused(model: Backbone, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalSteps(model, **settings)


def test_bad_inputs_are_refused(model: Backbone, batch: tuple) -> None:
    with pytest.raises(ShapeError, match="multiple of 4"):
        LocalSteps(model, 4, batches=4)(Weights.of(model), Batch(*batch))
    with pytest.raises(ShapeError, match="0 images"):
        LocalSteps(model)(Weights.of(model), Batch(*batch).examples(0, 0))
    with pytest.raises(ConfigError, match="execution: loop"):
        LocalSteps(model, checkpointing=True)(Weights.of(model), Batch(*batch), "functional")
