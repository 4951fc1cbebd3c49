"""DP-SGD: what is released, against a slow loop and the stated noise."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from lit_recon.defenses import DPSGD, Batch, BatchGradient, defended_gradient
from lit_recon.models import Backbone
from lit_recon.records import Update


def slow_clipped_mean(model: Backbone, batch: Batch, bound: float) -> Update:
    total = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    clipped = 0
    for image, label in zip(batch.images, batch.labels, strict=True):
        fresh = copy.deepcopy(model).eval()
        nn.functional.cross_entropy(fresh(image[None]), label[None]).backward()
        norm = math.sqrt(sum(float(value.grad.square().sum()) for value in fresh.parameters()))
        clipped += norm > bound
        for name, value in fresh.named_parameters():
            total[name] += value.grad * min(1.0, bound / norm)
    assert 0 < clipped < len(batch.images)
    return {name: value / len(batch.images) for name, value in total.items()}


def norms(model: Backbone, batch: Batch) -> list[float]:
    found = []
    for image, label in zip(batch.images, batch.labels, strict=True):
        grads = torch.autograd.grad(nn.functional.cross_entropy(model(image[None]), label[None]), model.parameters())
        found.append(math.sqrt(sum(float(value.square().sum()) for value in grads)))
    return sorted(found)


@pytest.mark.parametrize("chunk", ["auto", 2])
def test_release_equals_a_slow_loop(
    model: Backbone, gradient: BatchGradient, batch: Batch, generator: torch.Generator, chunk: int | str
) -> None:
    bound = norms(model, batch)[1] * 1.001
    expected = slow_clipped_mean(model, batch, bound)
    released = defended_gradient(DPSGD(bound), model, gradient, batch, generator, chunk)
    for name, value in expected.items():
        torch.testing.assert_close(released[name], value, rtol=1e-9, atol=1e-12)


def test_noise_has_the_stated_scale_and_lies_on_the_clipped_mean(
    model: Backbone, gradient: BatchGradient, batch: Batch
) -> None:
    bound, n = 0.05, len(batch.images)
    clean = defended_gradient(DPSGD(bound), model, gradient, batch, torch.Generator())
    squares, count = 0.0, 0
    for seed in range(20):
        noisy = defended_gradient(DPSGD(bound, 2.0), model, gradient, batch, torch.Generator().manual_seed(seed))
        for name, value in noisy.items():
            squares += float((value - clean[name]).square().sum())
            count += value.numel()
    variance = (2.0 * bound / n) ** 2
    assert abs(squares / count - variance) < 4 * variance * math.sqrt(2 / count)


def test_sensitivity_of_the_sum_is_the_bound(
    model: Backbone, gradient: BatchGradient, batch: Batch, generator: torch.Generator
) -> None:
    bound = 0.05
    whole = defended_gradient(DPSGD(bound), model, gradient, batch, generator)
    without = defended_gradient(DPSGD(bound), model, gradient, batch.examples(0, 2), generator)
    distance = math.sqrt(sum(float((3 * whole[name] - 2 * value).square().sum()) for name, value in without.items()))
    assert distance <= bound * (1 + 1e-9)


def test_extremes(model: Backbone, gradient: BatchGradient, batch: Batch, generator: torch.Generator) -> None:
    frozen = defended_gradient(DPSGD(0.0, 1.0), model, gradient, batch, generator)
    assert all(not value.any() for value in frozen.values())
    ruined = defended_gradient(DPSGD(1.0, 1000.0), model, gradient, batch, generator)
    plain = gradient(batch)
    cosine = torch.cosine_similarity(
        torch.cat([value.flatten() for value in ruined.values()]),
        torch.cat([value.flatten() for value in plain.values()]),
        dim=0,
    )
    assert abs(float(cosine)) < 0.15
