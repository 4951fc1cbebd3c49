"""Noise: its variance within four standard errors."""

from __future__ import annotations

import math

import pytest
import torch

from lit_recon.defenses import Batch, Defense, GaussianNoise, LaplaceNoise, Round, vectors
from lit_recon.defenses.vectors import flatten
from lit_recon.errors import UnsupportedModelError
from lit_recon.models import Backbone, ConvNet
from lit_recon.records import Normalization, Update

SIZE = 200_000
UPDATE: Update = {"a": torch.full((SIZE // 2,), 3.0), "b": torch.full((2, SIZE // 4), -1.0)}
NOWHERE = Round(Batch(torch.zeros(1, 1, 1, 1), torch.zeros(1, dtype=torch.int64)), lambda *_, **__: {})


@pytest.mark.parametrize(
    ("defense", "std", "kurtosis"),
    [
        (GaussianNoise(0.3), 0.3, 3),
        (GaussianNoise(0.3, relative=True), 0.3 * math.sqrt(5), 3),
        (LaplaceNoise(0.3), 0.3 * math.sqrt(2), 6),
    ],
    ids=repr,
)
def test_moments(defense: Defense, std: float, kurtosis: float, generator: torch.Generator) -> None:
    released = defense.transform_update(UPDATE, NOWHERE, generator)
    noise = flatten({name: value - UPDATE[name] for name, value in released.items()}).double()
    assert abs(float(noise.mean())) < 4 * std / math.sqrt(SIZE)
    # the variance of squares is (kurtosis - 1) std^4
    assert abs(float(noise.square().mean()) - std**2) < 4 * std**2 * math.sqrt((kurtosis - 1) / SIZE)
    assert abs(float(noise.pow(4).mean()) / std**4 - kurtosis) < 0.1 * kurtosis


def test_noise_before_averaging_shrinks_with_the_batch(generator: torch.Generator) -> None:
    defense = GaussianNoise(0.3, before_averaging=True)
    zeros = {"a": torch.zeros(4, SIZE)}
    mean = defense.transform_per_example(zeros, generator)["a"].mean(0)
    variance = 0.3**2 / 4
    assert abs(float(mean.square().mean()) - variance) < 4 * variance * math.sqrt(2 / SIZE)


def test_laplace_is_finite_at_the_ends_of_the_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    update = {"a": torch.zeros(3)}
    monkeypatch.setattr(vectors, "uniform_like", lambda *_: torch.tensor([0.0, 0.5, 1 - 2**-24]))
    released = LaplaceNoise(1.0).transform_update(update, NOWHERE, torch.Generator())["a"]
    assert torch.isfinite(released).all()
    assert released[0] < -15
    assert released[1] == 0
    assert released[2] > 15


def test_noise_of_single_examples_needs_them_separate() -> None:
    model = Backbone(ConvNet((1, 4, 4), widths=[2]), 3, Normalization((0.5,), (0.25,)))
    defense = GaussianNoise(0.3, before_averaging=True)
    assert defense.prepare(model) is model
    with pytest.raises(UnsupportedModelError, match="GroupNorm"):
        defense.prepare(model, "train")
    assert GaussianNoise(0.3).prepare(model, "train") is model
