"""Per-example gradients: every way against a slow loop of backward passes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lit_recon.defenses import Batch, BatchGradient, NetworkDropout, per_example_gradients
from lit_recon.errors import ConfigError
from lit_recon.models import Backbone
from lit_recon.records import Update


def slow_loop(model: Backbone, batch: Batch) -> Update:
    rows: list[Update] = []
    for image, label in zip(batch.images, batch.labels, strict=True):
        fresh = copy.deepcopy(model).eval()
        nn.functional.cross_entropy(fresh(image[None]), label[None]).backward()
        rows.append({name: value.grad for name, value in fresh.named_parameters()})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("options", [(), (1,), (2,), (9,), ("auto", "functional")], ids=str)
def test_equals_a_slow_loop(model: Backbone, gradient: BatchGradient, batch: Batch, options: tuple) -> None:
    pieces = list(per_example_gradients(gradient, batch, *options))
    expected = slow_loop(model, batch)
    for name, value in expected.items():
        torch.testing.assert_close(torch.cat([piece[name] for piece in pieces]), value, rtol=1e-9, atol=1e-12)


def test_the_mean_is_the_gradient_of_the_batch(gradient: BatchGradient, batch: Batch, update: Update) -> None:
    pieces = list(per_example_gradients(gradient, batch))
    for name, value in update.items():
        torch.testing.assert_close(torch.cat([piece[name] for piece in pieces]).mean(0), value)


def test_every_example_keeps_its_own_mask(
    model: Backbone, gradient_of: object, batch: Batch, generator: torch.Generator
) -> None:
    defense = NetworkDropout(0.5)
    prepared = defense.prepare(model)
    masked = defense.transform_batch(batch, prepared, generator)
    gradient = gradient_of(prepared)
    whole = gradient(masked)
    for chunk in (1, 2, 3):
        pieces = list(per_example_gradients(gradient, masked, chunk))
        for name, value in whole.items():
            torch.testing.assert_close(torch.cat([piece[name] for piece in pieces]).mean(0), value)


def test_an_empty_chunk_is_refused(gradient: BatchGradient, batch: Batch) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        list(per_example_gradients(gradient, batch, chunk=0))
