"""Objectives against plain formulas, and their custom differentiation rule against finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from lit_recon.attacks.updates import GlobalCosine, LayerwiseCosine, NormReweightedCosine, Objective, SquaredError
from lit_recon.attacks.updates.gradient_matching.objectives import ObservedUpdate
from lit_recon.errors import ConfigError, ThreatModelError

OBJECTIVES = [
    GlobalCosine(),
    LayerwiseCosine(),
    NormReweightedCosine(),
    NormReweightedCosine(0.5),
    SquaredError(),
    SquaredError(relative=True),
]


def updates(zero: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 4), "b": (5,), "c": (2, 2, 2)}
    ours, seen = (
        {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()} for _ in range(2)
    )
    seen["a"] *= 100
    if zero:
        seen["b"].zero_()
    return ours, seen


def vectors(ours: dict[str, torch.Tensor], seen: dict[str, torch.Tensor], power: float) -> tuple:
    scale = {name: value.norm() ** -power if power == 0 or value.any() else 0.0 for name, value in seen.items()}
    return tuple(torch.cat([(u[n] * scale[n]).flatten() for n in seen]) for u in (ours, seen))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("objective", "power"), [(GlobalCosine(), 0.0), (NormReweightedCosine(0.7), 0.7)])
def test_cosines_are_cosines(objective: Objective, power: float, zero: bool) -> None:
    ours, seen = updates(zero)
    expected = 1 - torch.cosine_similarity(*vectors(ours, seen, power), dim=0)
    assert float(objective(ours, ObservedUpdate.of(seen))) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("power", [1.0, 1.7, 2.0])
def test_layers_with_tiny_gradients_do_not_overflow(power: float) -> None:
    ours, seen = updates()
    seen["b"] *= 1e-15
    expected = NormReweightedCosine(power)(ours, ObservedUpdate.of(seen))
    single, target = ({name: value.float() for name, value in update.items()} for update in (ours, seen))
    single["a"].requires_grad_()
    found = NormReweightedCosine(power)(single, ObservedUpdate.of(target))
    assert found.item() == pytest.approx(float(expected), abs=1e-5)
    (slope,) = torch.autograd.grad(found, single["a"])
    assert slope.isfinite().all()


def test_layerwise_cosine_leaves_out_tensors_without_signal() -> None:
    ours, seen = updates(zero=True)
    cosines = [torch.cosine_similarity(ours[n].flatten(), seen[n].flatten(), dim=0) for n in ("a", "c")]
    assert float(LayerwiseCosine()(ours, ObservedUpdate.of(seen))) == pytest.approx(
        1 - float(sum(cosines)) / 2, abs=1e-12
    )


@pytest.mark.parametrize("relative", [False, True])
def test_squared_error(relative: bool) -> None:
    ours, seen = updates()
    mine, theirs = (torch.cat([value.flatten() for value in update.values()]) for update in (ours, seen))
    expected = (mine - theirs).square().sum() / (theirs.square().sum() if relative else 1)
    assert float(SquaredError(relative)(ours, ObservedUpdate.of(seen))) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{type(o).__name__}-{getattr(o, 'power', '')}")
@pytest.mark.parametrize("zero", [False, True])
def test_derivative_against_finite_differences(objective: Objective, zero: bool) -> None:
    ours, seen = updates(zero)
    target = ObservedUpdate.of(seen)
    leaves = [value.requires_grad_() for value in ours.values()]
    assert torch.autograd.gradcheck(
        lambda *values: objective(dict(zip(ours, values, strict=True)), target), leaves, eps=1e-6, atol=1e-8
    )


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_zero_and_stationary_at_the_truth(objective: Objective) -> None:
    _, seen = updates()
    ours = {name: value.clone().requires_grad_() for name, value in seen.items()}
    loss = objective(ours, ObservedUpdate.of(seen))
    assert abs(float(loss.detach())) < 1e-12
    scale = math.sqrt(sum(float(value.square().sum()) for value in seen.values()))
    for gradient in torch.autograd.grad(loss, list(ours.values())):
        assert float(gradient.norm()) * scale < 1e-10


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_works_under_vmap(objective: Objective) -> None:
    ours, seen = updates()
    other = {name: value.flip(0) for name, value in ours.items()}
    stacked = {name: torch.stack([ours[name], other[name]]) for name in ours}
    target = ObservedUpdate.of(seen)
    derivative = torch.func.grad_and_value(lambda update: objective(update, target))
    together, values = torch.func.vmap(derivative)(stacked)
    for i, update in enumerate((ours, other)):
        alone, value = derivative(update)
        assert float(values[i]) == pytest.approx(float(value), abs=1e-12)
        for name in ours:
            torch.testing.assert_close(together[name][i], alone[name])


def test_an_update_of_zeros_is_refused() -> None:
    with pytest.raises(ThreatModelError, match="zero everywhere"):
        ObservedUpdate.of({"a": torch.zeros(3)})


@pytest.mark.parametrize("power", [-0.1, 2.5])
def test_power_out_of_range(power: float) -> None:
    with pytest.raises(ConfigError, match="power"):
        NormReweightedCosine(power)
