"""Dropout and pruning of gradients: exact sparsity, and which coordinates go."""

from __future__ import annotations

import math

import pytest
import torch

from lit_recon.defenses import GradientDropout, GradientPruning, Round
from lit_recon.defenses.sparsity import lowest
from lit_recon.defenses.vectors import flatten
from lit_recon.records import Update


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 0.9, 0.99, 1.0])
def test_global_pruning_takes_exactly_the_smallest(
    update: Update, round_: Round, generator: torch.Generator, fraction: float
) -> None:
    before, after = flatten(update), flatten(GradientPruning(fraction).transform_update(update, round_, generator))
    assert before.ne(0).all()
    pruned = after == 0
    assert int(pruned.sum()) == round(fraction * len(before))
    assert torch.equal(after[~pruned], before[~pruned])
    if 0 < fraction < 1:
        assert before[pruned].abs().max() <= before[~pruned].abs().min()


@pytest.mark.parametrize("fraction", [0.3, 0.75])
def test_pruning_per_tensor(update: Update, round_: Round, generator: torch.Generator, fraction: float) -> None:
    released = GradientPruning(fraction, scope="tensor").transform_update(update, round_, generator)
    for name, value in released.items():
        assert int((value == 0).sum()) == round(fraction * value.numel())
        smallest = update[name].abs().flatten().sort().values[: round(fraction * value.numel())]
        torch.testing.assert_close(update[name][value == 0].abs().sort().values, smallest)


@pytest.mark.parametrize("count", [0, 1, 3, 5, 9, 10])
def test_ties_are_broken_to_the_exact_count(count: int) -> None:
    scores = torch.tensor([[1.0, 1, 1, 1, 0], [1, 1, 2, 2, 1]])
    mask = lowest(scores, count)
    assert int(mask.sum()) == count
    assert torch.equal(mask, lowest(scores, count))
    assert bool(mask[0, 4]) == (count > 0)
    assert int(mask[1, 2:4].sum()) == max(0, count - 8)


def test_more_coordinates_than_quantile_takes() -> None:
    scores = torch.arange(2**24 + 3, dtype=torch.float32)
    assert int(lowest(scores, 2**24).sum()) == 2**24


@pytest.mark.parametrize("rescale", [False, True])
def test_dropout(round_: Round, generator: torch.Generator, rescale: bool) -> None:
    n, rate = 100_000, 0.7
    update = {"a": torch.full((n,), 2.0), "b": torch.full((n, 1), -1.0)}
    released = GradientDropout(rate, rescale).transform_update(update, round_, generator)
    values = flatten(released)
    dropped = float((values == 0).double().mean())
    assert abs(dropped - rate) < 4 * math.sqrt(rate * (1 - rate) / (2 * n))
    kept = values[values != 0].unique()
    torch.testing.assert_close(kept, torch.tensor([-1.0, 2.0]) / (1 - rate if rescale else 1))
    both = ((released["a"] == 0) & (released["b"][:, 0] == 0)).double().mean()
    assert abs(float(both) - rate**2) < 4 * math.sqrt(rate**2 / n)


def test_everything_dropped(update: Update, round_: Round, generator: torch.Generator) -> None:
    for defense in (GradientDropout(1.0), GradientPruning(1.0)):
        assert not flatten(defense.transform_update(update, round_, generator)).any()
