"""Dropout and pruning of gradients: exact sparsity, and which coordinates go."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lit_recon.defenses import (
    Batch,
    BatchGradient,
    Chain,
    Defense,
    ExcludedVariables,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    OptimalGradientPruning,
    PercentilePrivacy,
    PerExampleClipping,
    Round,
    defended_gradient,
)
from lit_recon.defenses.combined import AveragedDefense
from lit_recon.defenses.sparsity import lowest
from lit_recon.defenses.vectors import flatten
from lit_recon.models import Backbone
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


def hidden_in(released: Update, whole: Update, gamma: float | None = None) -> dict[str, Tensor]:
    """True magnitudes of what a release has as zero, in its units: of entries that were not cut off, or of `gamma`."""
    kept = flatten(released) != 0
    scale = (flatten(released)[kept] / flatten(whole)[kept]).max() if gamma is None else flatten(released).max() / gamma
    return {name: scale * whole[name][value == 0].abs() for name, value in released.items()}


class HalfScaled(Defense):
    """Changes tensors by different numbers, and does not say what it hides."""

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        return {name: (0.5 if name.startswith("head") else 1.0) * value for name, value in update.items()}


@pytest.mark.parametrize(
    "defense",
    [
        GradientPruning(0.6),
        GradientPruning(0.6, "tensor"),
        PercentilePrivacy(60.0),
        PercentilePrivacy(60.0, gamma=0.3),
        Chain([GradientClipping(0.05), GradientPruning(0.6)]),
        Chain([PerExampleClipping(0.05), GradientPruning(0.6, "tensor"), GradientClipping(0.02)]),
        Chain([GradientPruning(0.6), GradientClipping(0.05)]),
        Chain([GradientPruning(0.4, "tensor"), GradientPruning(0.7)]),
        Chain([GradientPruning(0.7), GradientPruning(0.4, "tensor")]),
        Chain([GradientPruning(0.6), PercentilePrivacy(gamma=0.3)]),
        Chain([PercentilePrivacy(60.0, gamma=0.3), GradientClipping(0.05)]),
        Chain([PercentilePrivacy(gamma=0.3), GradientPruning(0.6)]),
    ],
    ids=repr,
)
def test_hidden_entries_are_below_the_smallest_kept(
    model: Backbone, gradient: BatchGradient, batch: Batch, generator: torch.Generator, defense: Defense
) -> None:
    stages = defense.defenses if isinstance(defense, Chain) else [defense]
    clipped = [one for one in stages if isinstance(one, PerExampleClipping)]
    whole = defended_gradient(Chain(clipped), model, gradient, batch, generator)
    released = defended_gradient(defense, model, gradient, batch, generator)
    bounds, hidden, tight = defense.largest_hidden(released), hidden_in(released, whole), 0
    for name, values in hidden.items():
        if len(values) and bounds[name] < math.inf:
            assert float(values.max()) <= bounds[name] * (1 + 1e-12)
            tight += float(values.max()) > 0.8 * bounds[name]
    assert tight > 0
    assert sum(bound < math.inf for bound in bounds.values()) >= len(bounds) / 2


@pytest.mark.parametrize(
    ("defense", "gamma"),
    [
        (GradientDropout(0.6), None),
        (OptimalGradientPruning(0.6), None),
        (Chain([GradientPruning(0.3), GradientDropout(0.5)]), None),
        (Chain([GradientDropout(0.5), GradientPruning(0.3)]), None),
        (Chain([GradientPruning(0.6), HalfScaled()]), None),
        # entries larger than gamma are hidden, and the others are all cut off to it
        (PercentilePrivacy(60.0, gamma=1e-4), 1e-4),
        (Chain([PercentilePrivacy(60.0, gamma=1e-4), GradientClipping(0.001)]), 1e-4),
        (Chain([GradientPruning(0.6), PercentilePrivacy(gamma=1e-4)]), 1e-4),
        (Chain([PercentilePrivacy(gamma=1e-4), GradientPruning(0.9)]), 1e-4),
    ],
    ids=repr,
)
def test_hidden_entries_of_any_size_have_no_bound(
    model: Backbone,
    gradient: BatchGradient,
    batch: Batch,
    generator: torch.Generator,
    defense: Defense,
    gamma: float | None,
) -> None:
    released, whole = defended_gradient(defense, model, gradient, batch, generator), gradient(batch)
    bounds, exceeded = defense.largest_hidden(released), 0
    least = min(float(value[value != 0].abs().min()) for value in released.values() if bool(value.any()))
    for name, values in hidden_in(released, whole, gamma).items():
        assert bounds[name] == math.inf or not len(values) or float(values.max()) <= bounds[name]
        exceeded += bool((values > least).any())
    # a bound by what was kept would be wrong
    assert exceeded > 0
    assert math.inf in bounds.values()


def test_what_is_known_of_hidden_entries_by_tensor(update: Update, round_: Round, generator: torch.Generator) -> None:
    without_head = Chain([ExcludedVariables("^head"), GradientPruning(0.5)])
    bounds = without_head.largest_hidden(without_head.transform_update(update, round_, generator))
    assert {name for name, bound in bounds.items() if bound == math.inf} == {"head.weight", "head.bias"}
    released = GradientPruning(0.5).transform_update(update, round_, generator)
    for hides_nothing in (Defense(), Chain(), GradientClipping(0.1), PerExampleClipping(0.1), GradientPruning()):
        assert set(hides_nothing.largest_hidden(released).values()) == {0.0}
    # entries below the noise are not below what was kept of them, and clients' masks are not seen in the mean
    noise = GaussianNoise(0.1)
    for unknown in (Chain([noise, GradientPruning(0.5)]), Chain([GradientPruning(0.5), noise])):
        assert set(unknown.largest_hidden(released).values()) == {math.inf}
    assert set(AveragedDefense(GradientPruning(0.5), 2).largest_hidden(released).values()) == {math.inf}
    assert set(GradientPruning(1.0).largest_hidden({"a": torch.zeros(3)}).values()) == {math.inf}


def test_tensors_without_dimensions_bound_nothing(round_: Round, generator: torch.Generator) -> None:
    update = {"a": torch.tensor([3.0, -1.0, 2.0, 0.5]), "scalar": torch.tensor(0.1)}
    defense = PercentilePrivacy(60.0)
    released = defense.transform_update(update, round_, generator)
    assert released["a"].tolist() == [3.0, 0.0, 2.0, 0.0]
    assert float(released["scalar"]) == pytest.approx(0.1)
    assert defense.largest_hidden(released)["a"] == 2.0
