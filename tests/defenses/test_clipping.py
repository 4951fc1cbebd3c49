"""Clipping: the stated bound, the gradient itself within it, and the edge cases of the table."""

from __future__ import annotations

import math

import pytest
import torch

from lit_recon.defenses import (
    Batch,
    BatchGradient,
    GradientClipping,
    PerExampleClipping,
    Round,
    per_example_gradients,
)
from lit_recon.defenses.clipping import clipped, clipped_examples
from lit_recon.errors import UnsupportedModelError
from lit_recon.models import Backbone, ConvNet
from lit_recon.records import Normalization, Update


def norm(update: Update) -> float:
    return math.sqrt(sum(float(value.detach().double().square().sum()) for value in update.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [0.01, 0.5, 0.999])
def test_the_bound_is_met_and_the_direction_kept(update: Update, dtype: torch.dtype, factor: float) -> None:
    update = {name: value.to(dtype) for name, value in update.items()}
    bound = factor * norm(update)
    released = clipped(update, bound)
    assert norm(released) == pytest.approx(bound, rel=1e-6)
    for name, value in update.items():
        torch.testing.assert_close(released[name], value * factor, rtol=1e-5, atol=0)


def test_edges(update: Update) -> None:
    for bound in (norm(update) * 1.001, math.inf):
        assert all(torch.equal(value, update[name]) for name, value in clipped(update, bound).items())
    zeros = {name: torch.zeros_like(value, requires_grad=True) for name, value in update.items()}
    for bound in (0.0, 1.0, math.inf):
        released = clipped(zeros, bound)
        assert norm(released) == 0
        slopes = torch.autograd.grad(sum(value.sum() for value in released.values()), list(zeros.values()))
        assert all(torch.isfinite(slope).all() for slope in slopes)
    for bound in (1e6, math.inf):
        own = {name: value.clone().requires_grad_() for name, value in update.items()}
        slopes = torch.autograd.grad(sum(value.sum() for value in clipped(own, bound).values()), list(own.values()))
        assert all(torch.equal(slope, torch.ones_like(slope)) for slope in slopes)
    assert norm(clipped(update, 0.0)) == 0
    assert norm(clipped_examples({"a": torch.ones(3, 2)}, 0.0)) == 0


def test_each_example_is_bounded_by_itself(gradient: BatchGradient, batch: Batch) -> None:
    singles = list(per_example_gradients(gradient, batch))
    norms = [norm(single) for single in singles]
    bound = sorted(norms)[1]
    stacked = {name: torch.cat([single[name] for single in singles]) for name in singles[0]}
    released = clipped_examples(stacked, bound)
    for i, before in enumerate(norms):
        assert norm({name: value[i] for name, value in released.items()}) == pytest.approx(min(before, bound))
        factor = min(1.0, bound / before)
        for name, value in released.items():
            torch.testing.assert_close(value[i], stacked[name][i] * factor)


def test_whole_gradient(update: Update, round_: Round, generator: torch.Generator) -> None:
    released = GradientClipping(0.01).transform_update(update, round_, generator)
    assert norm(released) == pytest.approx(0.01)


@pytest.mark.parametrize("track", [True, False])
def test_batch_norm_is_refused_where_it_mixes_examples(track: bool) -> None:
    model = Backbone(ConvNet((1, 4, 4), widths=[2, 2]), 3, Normalization((0.5,), (0.25,)))
    if track:
        assert PerExampleClipping(1.0).prepare(model) is model
    else:
        model.trunk.layers[1].running_mean = None
    with pytest.raises(UnsupportedModelError, match=r"'trunk\.layers\.1'.*GroupNorm"):
        PerExampleClipping(1.0).prepare(model, "train" if track else "eval")
