"""The Jacobian of a network's gradient by products and layer by layer, beside the stored one of autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lit_recon.bounds import (
    NetworkJacobian,
    NoisyRelease,
    ProductJacobian,
    Rounding,
    autograd_jacobian,
    cramer_rao,
    unknown_directions,
)
from lit_recon.bounds.fisher import DenseJacobian
from lit_recon.clients.gradient import GradientOperator, pure_copy
from lit_recon.defenses import DPSGD, Defense, GradientClipping, GradientDropout, GradientPruning, Round
from lit_recon.errors import ConfigError, TimeLimitError
from lit_recon.records import Batch, BatchNormMode, Loss, Update, Weights

LABELS = torch.tensor([0, 2])


class Residual(nn.Module):
    """A block of two convolutions with strides and biases beside a 1x1 convolution."""

    def __init__(self, norm: Callable[[int], nn.Module], activation: nn.Module) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False), norm(3)
        self.second, self.norm2 = nn.Conv2d(3, 3, 3, padding=1), norm(3)
        self.shortcut, self.activation = nn.Conv2d(2, 3, 1, stride=2), activation

    def forward(self, inputs: Tensor) -> Tensor:
        inner = self.activation(self.norm1(self.first(inputs)))
        out: Tensor = self.activation(self.norm2(self.second(inner)) + self.shortcut(inputs))
        return out


def network(norm: Callable[[int], nn.Module], activation: nn.Module, *behind: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Conv2d(1, 2, 3, padding=1), norm(2), nn.MaxPool2d(2), Residual(norm, activation))
    model = nn.Sequential(*blocks, *behind, nn.Flatten(), nn.Linear(12, 3)).double()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return model


def images(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


def both(
    model: nn.Module, mode: BatchNormMode = "eval", loss: Loss = nn.functional.cross_entropy
) -> tuple[NetworkJacobian, DenseJacobian]:
    weights, operator = Weights.of(model), GradientOperator(model, mode, loss)
    ours = NetworkJacobian(pure_copy(model, mode), weights, Batch(images(), LABELS), loss)
    return ours, autograd_jacobian(lambda x: operator(weights, Batch(x, LABELS), "functional"), images(), chunk=64)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def random_weights(update: Update) -> Update:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.rand(v.shape, generator=generator, dtype=torch.float64) for name, v in update.items()}


BATCH, GROUP = nn.BatchNorm2d, partial(nn.GroupNorm, 1)


@pytest.mark.parametrize(
    ("norm", "activation", "mode", "piecewise"),
    [
        (BATCH, nn.ReLU(), "eval", True),
        (BATCH, nn.LeakyReLU(0.1), "eval", True),
        (BATCH, nn.ReLU(), "train", False),
        (BATCH, nn.GELU(), "eval", False),
        (GROUP, nn.ReLU(), "eval", False),
        (GROUP, nn.ELU(), "eval", False),
    ],
)
def test_products_are_those_of_the_stored_jacobian(
    norm: Callable[[int], nn.Module], activation: nn.Module, mode: BatchNormMode, piecewise: bool
) -> None:
    ours, dense = both(network(norm, activation), mode)
    assert ours.is_piecewise_linear == piecewise
    assert list(ours.update) == list(dense.update)
    assert all((ours.update[name] - value).abs().max() < 1e-12 for name, value in dense.update.items())
    # measured 2e-15 at most, here and below
    assert relative(ours.gram(2.5), dense.gram(2.5)) < 1e-12
    weights = random_weights(dense.update)
    assert relative(ours.gram(weights), dense.gram(weights)) < 1e-12
    assert relative(ours.transposed(weights), dense.transposed(weights)) < 1e-12
    direction = images().flatten()
    for name, moved in ours.along(direction.view(1, 2, 1, 8, 8)).items():
        assert (moved.flatten() - dense.rows[name] @ direction).abs().max() < 1e-12
    if mode == "eval":  # with the batch's statistics, images depend on each other
        assert ours.gram()[:64, :64].abs().max() > 0


def test_curvature_is_not_taken_for_piecewise_linear() -> None:
    ours, dense = both(network(BATCH, nn.GELU()))
    ours.__dict__["is_piecewise_linear"] = True  # without the check, what is linear in the derivatives is all
    assert relative(ours.gram(), dense.gram()) > 1e-3


class Odd(nn.Module):
    """A convolution that is used twice, a grouped one, a circular one, and a weight of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.grouped = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1, groups=3)
        self.circular = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.scale * self.circular(self.grouped(self.twice(self.twice(inputs).relu())).relu())
        return out


def test_parameters_of_other_kinds_take_part() -> None:
    ours, dense = both(network(BATCH, nn.ReLU(), Odd()))
    assert not ours.is_piecewise_linear
    assert relative(ours.gram(), dense.gram()) < 1e-12
    assert relative(ours.gram(random_weights(dense.update)), dense.gram(random_weights(dense.update))) < 1e-12


class Shared(nn.Module):
    """Two convolutions with one weight, one whose weight and bias are used by a function too, and a computed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.second.weight = self.first.weight
        self.normed = torch.nn.utils.spectral_norm(nn.Conv2d(3, 3, 3, padding=1))

    def forward(self, inputs: Tensor) -> Tensor:
        inner = self.third(self.second(self.first(inputs).relu()).relu()).relu()
        out: Tensor = self.normed(nn.functional.conv2d(inner, self.third.weight, self.third.bias, padding=1))
        return out


def test_all_uses_of_a_shared_weight_count() -> None:
    ours, dense = both(network(BATCH, nn.ReLU(), Shared().double()))
    assert all((ours.update[name] - value).abs().max() < 1e-12 for name, value in dense.update.items())
    assert relative(ours.gram(), dense.gram()) < 1e-12
    assert relative(ours.gram(random_weights(dense.update)), dense.gram(random_weights(dense.update))) < 1e-12


def test_little_memory_takes_several_passes() -> None:
    ours, dense = both(network(BATCH, nn.ReLU()))
    assert len(ours._linear._groups(128)) == 1
    ours._linear._memory = 1
    assert len(ours._linear._groups(128)) == 8
    assert relative(ours.gram(), dense.gram()) < 1e-12


def test_any_function_has_products() -> None:
    def update(x: Tensor) -> Update:
        return {"w": x.sin().outer(x), "b": x.square()}

    inputs = images().flatten()[:6]
    ours, dense = ProductJacobian(update, inputs, chunk=4), autograd_jacobian(update, inputs)
    weights = {"w": inputs.outer(inputs), "b": inputs}
    assert relative(ours.gram(weights), dense.gram(weights)) < 1e-13
    assert relative(ours.transposed(weights), dense.transposed(weights)) < 1e-13


def test_products_are_derivatives() -> None:
    model, step = network(GROUP, nn.ELU()), 1e-5
    ours, operator = both(model)[0], GradientOperator(model)
    direction = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ends = [operator(Weights.of(model), Batch(images() + sign * step * direction, LABELS)) for sign in (1, -1)]
    for name, moved in ours.along(direction[None]).items():
        assert (moved[0] - (ends[0][name] - ends[1][name]) / (2 * step)).abs().max() < 1e-7  # measured 2e-9


@pytest.mark.parametrize(
    "defense",
    [GradientClipping(0.1), GradientDropout(0.5), GradientPruning(0.7), DPSGD(0.1, 1.0)],
    ids=["clipping", "dropout", "pruning", "dp_sgd"],
)
def test_defenses_release_the_information_of_the_stored_jacobian(defense: Defense) -> None:
    model = network(BATCH, nn.ReLU())
    operator, found = GradientOperator(model), []
    for jacobian in both(model, loss=summed):
        round_ = Round(Batch(images(), LABELS), partial(operator, Weights.of(model)))
        released = defense.released_information(jacobian, round_, 0.3, torch.Generator().manual_seed(0))
        found.append(released.information)
    assert relative(*found) < 1e-10
    std = 0.1 / 2 if isinstance(defense, DPSGD) else 0.3
    everything = both(model, loss=summed)[1].released(NoisyRelease(std)).information
    # clipping one by one changes the weights of examples whose gradients depend on each other
    if not isinstance(defense, DPSGD):
        assert torch.linalg.eigvalsh(everything - found[0])[0] > -1e-10 * float(everything.trace())
    # measured 0.91 behind pruning, less behind the others
    assert found[0].trace() < 0.95 * everything.trace()


def test_rounding_is_as_large_as_it_says() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
    batch = Batch(images(torch.float32)[:1], LABELS[:1])
    ours = NetworkJacobian(model, Weights.of(model), batch)
    twice = NetworkJacobian(model.double(), Weights.of(model.double()), Batch(batch.images.double(), batch.labels))
    for weights in (1.0, {name: torch.ones_like(value) for name, value in ours.update.items()}):
        found, expected = ours.gram(weights), twice.gram()
        rounding = Rounding.of(found, ours.rounding(16))
        error = float(torch.linalg.matrix_norm(found - expected, 2))
        assert 0.2 * error < rounding.size < 5 * error  # measured 0.7 and 0.8
        bounds = cramer_rao(found).rmse, cramer_rao(expected).rmse
        assert abs(bounds[0] / bounds[1] - 1) < 30 * rounding.relative  # measured 9: errors are not independent
        assert rounding.relative < 1e-3


def test_directions_below_the_rounding_are_unknown() -> None:
    information = torch.diag(torch.tensor([1e-6, 1e-2, 1.0], dtype=torch.float64))
    assert [unknown_directions(information, size) for size in (0.0, 1e-5, 0.1)] == [0, 1, 2]
    errors = torch.full((3, 3), 1e-5, dtype=torch.float64)
    assert Rounding.of(information, errors).relative == math.inf
    assert Rounding.of(information, errors / 1e6).relative < 1e-4


def test_work_is_announced_and_refused() -> None:
    shares: list[float] = []
    model = network(BATCH, nn.ReLU())
    batch, weights = Batch(images(), LABELS), Weights.of(model)
    NetworkJacobian(pure_copy(model, "eval"), weights, batch, progress=lambda share, _: shares.append(share)).gram()
    assert shares == sorted(shares)
    assert shares[-1] == 1
    for given in (1.0, random_weights(dict(weights.parameters))):
        with pytest.raises(TimeLimitError, match=r"128 pixels would take about .* minutes"):
            NetworkJacobian(pure_copy(model, "eval"), weights, batch, limit=1e-9).gram(given)
    with pytest.raises(ConfigError, match="1 column"):
        ProductJacobian(lambda x: {"w": x}, torch.ones(2), chunk=0)
