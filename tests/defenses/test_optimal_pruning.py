"""Optimal Gradient Pruning: largest n_j / |g_j| first, within either budget."""

from __future__ import annotations

import pytest
import torch

from lit_recon.defenses import (
    Batch,
    BatchGradient,
    GradientPruning,
    OptimalGradientNoise,
    OptimalGradientPruning,
    Round,
)
from lit_recon.defenses.optimal import leakage, sensitivities
from lit_recon.defenses.vectors import flatten
from lit_recon.records import Update


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_exact_count_of_the_largest_scores(
    gradient: BatchGradient, batch: Batch, update: Update, round_: Round, generator: torch.Generator, fraction: float
) -> None:
    released = OptimalGradientPruning(fraction, directions=None).transform_update(update, round_, generator)
    pruned = flatten(released) == 0
    scores = flatten(leakage(sensitivities(gradient, batch, None), update))
    assert int(pruned.sum()) == round(fraction * len(scores))
    assert scores[pruned].min() >= scores[~pruned].max()


@pytest.mark.parametrize("fraction", [0.5, 0.9, 1.0])
def test_weighted_budget_is_that_of_magnitude_pruning(
    gradient: BatchGradient, batch: Batch, update: Update, round_: Round, generator: torch.Generator, fraction: float
) -> None:
    n = sensitivities(gradient, batch, None)
    released = OptimalGradientPruning(fraction, match="weighted", directions=None).pruned(update, n)
    plain = GradientPruning(fraction).transform_update(update, round_, generator)
    lost = [float((flatten(update) - flatten(other)).square().sum()) for other in (released, plain)]
    assert lost[0] <= lost[1] * (1 + 1e-8)
    # the next coordinate in line would not have fitted
    scores, kept = flatten(leakage(n, update)), flatten(released) != 0
    if kept.any():
        following = scores.masked_fill(~kept, -1).argmax()
        assert lost[0] + float(flatten(update)[following].square()) > lost[1]
    else:
        assert fraction == 1.0


def test_less_is_left_to_see_than_after_magnitude_pruning_of_equal_energy(
    gradient: BatchGradient, batch: Batch, update: Update, round_: Round, generator: torch.Generator
) -> None:
    n = sensitivities(gradient, batch, None)
    released = OptimalGradientPruning(0.9, match="weighted").pruned(update, n)
    plain = GradientPruning(0.9).transform_update(update, round_, generator)

    def left(pruned: Update) -> float:
        return float(flatten(n)[flatten(pruned) != 0].square().sum())

    assert left(released) < left(plain)


def test_dead_coordinates_go_last() -> None:
    n = {"a": torch.tensor([0.0, 1.0, 3.0, 0.5])}
    g = {"a": torch.tensor([0.0, 1.0, 1.0, 0.0])}
    released = OptimalGradientPruning(0.5).pruned(g, n)["a"]
    assert released.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_both_optimal_defenses_share_their_scores() -> None:
    noise, pruning = OptimalGradientNoise(), OptimalGradientPruning()
    assert (noise.floor, noise.cap, noise.directions) == (pruning.floor, pruning.cap, pruning.directions)
