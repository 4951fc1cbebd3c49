"""Optimal Gradient Noise: optimal at its own budget, and not at the one of the published code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lit_recon.defenses import Batch, BatchGradient, OptimalGradientNoise, Round
from lit_recon.defenses.optimal import sensitivities
from lit_recon.defenses.vectors import flatten
from lit_recon.models import Backbone, ConvNet
from lit_recon.records import Normalization, Update

STD = 0.01


def energies(variance: Update, update: Update) -> tuple[float, float]:
    v, g = flatten(variance).double(), flatten(update).double()
    return float(v.mean()), float((g.square() * v).sum() / g.square().sum())


@pytest.mark.parametrize("match", ["energy", "weighted"])
def test_the_budget_is_that_of_uniform_noise(gradient: BatchGradient, batch: Batch, update: Update, match: str) -> None:
    variance = OptimalGradientNoise(STD, match).variances(update, sensitivities(gradient, batch, None))
    plain, weighted = energies(variance, update)
    assert (weighted if match == "weighted" else plain) == pytest.approx(STD**2)


def test_variances_follow_the_leakage(gradient: BatchGradient, batch: Batch, update: Update) -> None:
    n = sensitivities(gradient, batch, None)
    variance = flatten(OptimalGradientNoise(STD).variances(update, n))
    ratio = variance * flatten(update).abs() / flatten(n)
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio))


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("directions", [None, 10])
def test_fisher_trace_falls_at_equal_weighted_energy_and_rises_at_equal_energy(
    gradient_of: Callable[[Backbone], BatchGradient], activation: str, directions: int | None
) -> None:
    torch.manual_seed(0)
    trunk = ConvNet((1, 8, 8), widths=[8, 8, 8], norm="none", activation=activation)
    model = Backbone(trunk, 5, Normalization((0.5,), (0.25,)))
    batch = Batch(torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))
    gradient = gradient_of(model)
    update, n = gradient(batch), sensitivities(gradient, batch, None)
    seen = n if directions is None else sensitivities(gradient, batch, directions, torch.Generator().manual_seed(0))
    squared = flatten(n).double().square()
    visible, traces = squared > 0, {}
    for match in ("energy", "weighted"):
        variance = flatten(OptimalGradientNoise(STD, match).variances(update, seen)).double()
        traces[match] = float((squared / variance)[visible].sum() / (squared / STD**2).sum())
    cosine = torch.cosine_similarity(flatten(n).double(), flatten(update).double().abs(), dim=0)
    # with 10 directions the variances are nearly the best ones
    assert traces["weighted"] == pytest.approx(float(cosine) ** 2, rel=1e-4 if directions is None else 0.2)
    assert traces["weighted"] < 0.4
    assert traces["energy"] > 1


def test_measured_scale_multiplies_the_energy_match(gradient: BatchGradient, batch: Batch, update: Update) -> None:
    n = sensitivities(gradient, batch, None)
    energy = flatten(OptimalGradientNoise(STD, "energy").variances(update, n))
    measured = flatten(OptimalGradientNoise(STD, "measured", scale=3.0).variances(update, n))
    torch.testing.assert_close(measured, 9 * energy)
    none = flatten(OptimalGradientNoise(STD, "measured", scale=0.0).variances(update, n))
    assert not none.any()


def test_released_noise_has_the_stated_variances(update: Update, round_: Round) -> None:
    defense = OptimalGradientNoise(STD, directions=1)
    squares = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        n = sensitivities(round_.gradient, round_.batch, 1, generator)
        variance = flatten(defense.variances(update, n))
        released = defense.transform_update(update, round_, torch.Generator().manual_seed(seed))
        squares.append((flatten(released) - flatten(update)).square() / variance)
    chi = torch.cat(squares)
    assert abs(float(chi.mean()) - 1) < 4 * (2 / len(chi)) ** 0.5


def test_nothing_depends_on_the_images(update: Update) -> None:
    zeros = {name: torch.zeros_like(value) for name, value in update.items()}
    for match in ("energy", "weighted"):
        variance = OptimalGradientNoise(STD, match).variances(update, zeros)
        torch.testing.assert_close(flatten(variance), torch.full_like(flatten(update), STD**2))
        both = OptimalGradientNoise(STD, match).variances(zeros, zeros)
        assert torch.isfinite(flatten(both)).all()
