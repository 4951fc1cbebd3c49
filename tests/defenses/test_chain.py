"""Chains: the order of action, and the orders that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch

from lit_recon.clients import GradientOperator
from lit_recon.defenses import (
    DPSGD,
    Batch,
    BatchGradient,
    Chain,
    Defense,
    ExcludedVariables,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    MixUp,
    NetworkDropout,
    PercentilePrivacy,
    PerExampleClipping,
    Round,
    Stage,
    defended_gradient,
    simulated_gradient,
)
from lit_recon.defenses.vectors import flatten
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models import Backbone
from lit_recon.records import Update, Weights


def test_stages_act_in_the_order_of_the_list(update: Update, round_: Round) -> None:
    noise, prune = GaussianNoise(0.1), GradientPruning(0.5)

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    pruned_last = Chain([noise, prune]).transform_update(update, round_, seeded())
    pruned_first = Chain([prune, noise]).transform_update(update, round_, seeded())
    half = round(len(flatten(update)) / 2)
    assert int((flatten(pruned_last) == 0).sum()) == half
    assert int((flatten(pruned_first) == 0).sum()) == 0
    expected = prune.transform_update(noise.transform_update(update, round_, seeded()), round_, seeded())
    assert torch.equal(flatten(pruned_last), flatten(expected))


def test_all_stages_reach_the_release(
    model: Backbone, gradient_of: Callable[[Backbone], BatchGradient], batch: Batch
) -> None:
    chain = Chain([MixUp(1.0), NetworkDropout(0.5), PerExampleClipping(0.02), GradientPruning(0.5)])
    assert chain.stages == (Stage.BATCH, Stage.PER_EXAMPLE, Stage.UPDATE)
    prepared = chain.prepare(model)
    gradient = gradient_of(prepared)
    released = flatten(defended_gradient(chain, prepared, gradient, batch, torch.Generator().manual_seed(0)))
    assert released.norm() <= 0.02
    assert int((released == 0).sum()) >= len(released) // 2

    generator = torch.Generator().manual_seed(0)
    by_hand = NetworkDropout(0.5).transform_batch(
        MixUp(1.0).transform_batch(batch, prepared, generator), prepared, generator
    )
    total = torch.zeros_like(released)
    for i in range(3):
        single = flatten(gradient(by_hand.examples(i, i + 1)))
        total += single * min(1.0, 0.02 / float(single.norm()))
    mean = total / 3
    kept = released != 0
    torch.testing.assert_close(released[kept], mean[kept])
    assert mean[~kept].abs().max() <= mean[kept].abs().min()


@pytest.mark.parametrize("bound", [1e-3, 1e3])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([GradientDropout(0.5)], [GradientDropout(0.8)]),
        ([GradientDropout(0.5)], [GradientDropout(0.8, rescale=True)]),
        ([GradientPruning(0.5)], [GradientDropout(0.8)]),
        ([GradientDropout(0.5)], [PercentilePrivacy(80.0), GradientClipping(5e-4)]),
        ([GradientDropout(0.5)], [ExcludedVariables("weight")]),
        ([GradientClipping(1e-2), GradientPruning(0.5)], [GradientPruning(0.8)]),
        ([], [GradientDropout(0.8)]),
        ([GradientDropout(0.8)], []),
    ],
)
def test_clipping_between_masks_is_simulated_at_the_released_norm(
    before: list[Defense], after: list[Defense], bound: float, update: Update, round_: Round
) -> None:
    chain = Chain([*before, GradientClipping(bound), *after])
    released = chain.transform_update(update, round_, torch.Generator().manual_seed(0))
    assert flatten(released).any()
    found = chain.simulate(update, released)
    torch.testing.assert_close(flatten(found), flatten(released), rtol=1e-5, atol=0)
    # several candidates, each with its own released update
    pairs = [{name: torch.stack([value, 2 * value]) for name, value in one.items()} for one in (update, released)]
    both = torch.func.vmap(chain.simulate)(*pairs)
    torch.testing.assert_close(flatten({name: value[0] for name, value in both.items()}), flatten(released))


@pytest.mark.parametrize(
    ("defenses", "remedy"),
    [
        ([GaussianNoise(0.1), PerExampleClipping(1.0)], "list them as [PerExampleClipping(bound=1.0), GaussianNoise("),
        ([PerExampleClipping(1.0), MixUp(1.0)], "list them as [MixUp(alpha=1.0), PerExampleClipping(bound=1.0)]"),
        ([DPSGD(1.0), PerExampleClipping(1.0)], "list them as [PerExampleClipping(bound=1.0), DPSGD("),
        ([DPSGD(1.0), Defense(), DPSGD(2.0)], "leave one out"),
        ([Chain([MixUp(1.0), GradientPruning(0.5)]), Chain([MixUp(1.0)])], "list them as"),
    ],
    ids=repr,
)
def test_orders_that_contradict_a_round_are_refused(defenses: list[Defense], remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        Chain(defenses)


def test_the_attacker_sets_the_buffers_of_every_defense(
    model: Backbone, gradient_of: Callable[[Backbone], BatchGradient], batch: Batch
) -> None:
    chain = Chain([NetworkDropout(0.5), PerExampleClipping(0.05), GradientPruning(0.0)])
    prepared, one = chain.prepare(model), batch.examples(0, 1)
    gradient = gradient_of(prepared)
    released = defended_gradient(chain, prepared, gradient, one, torch.Generator().manual_seed(0))
    buffers = chain.simulate_buffers(dict(prepared.named_buffers()), released, 1)
    simulation = partial(GradientOperator(prepared), Weights.of(prepared)._replace(buffers=buffers))
    simulated = simulated_gradient(chain, simulation, one, released)
    torch.testing.assert_close(flatten(simulated), flatten(released))


def test_an_empty_batch_is_refused(model: Backbone, gradient: BatchGradient, batch: Batch) -> None:
    with pytest.raises(ShapeError, match="empty batch"):
        defended_gradient(Chain(), model, gradient, batch.examples(0, 0), torch.Generator())


def test_a_plain_release_is_the_gradient_bit_for_bit(
    model: Backbone, gradient: BatchGradient, batch: Batch, update: Update, generator: torch.Generator
) -> None:
    for defense in (Defense(), Chain(), GradientClipping(), GaussianNoise()):
        released = defended_gradient(defense, model, gradient, batch, generator)
        assert all(torch.equal(value, update[name]) for name, value in released.items())
