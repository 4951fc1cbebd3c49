"""Sensitivities of the gradient to the images, against the full Jacobian."""

from __future__ import annotations

import math

import pytest
import torch

from lit_recon.defenses import Batch, BatchGradient
from lit_recon.defenses.optimal import leakage, sensitivities
from lit_recon.defenses.vectors import flatten
from lit_recon.errors import ConfigError


@pytest.fixture
def jacobian(gradient: BatchGradient, batch: Batch) -> torch.Tensor:
    def of_images(images: torch.Tensor) -> torch.Tensor:
        return flatten(gradient(batch._replace(images=images), "autograd"))

    return torch.autograd.functional.jacobian(of_images, batch.images).flatten(1)


def test_exact_scores_are_the_norms_of_the_rows(gradient: BatchGradient, batch: Batch, jacobian: torch.Tensor) -> None:
    found = flatten(sensitivities(gradient, batch, None))
    torch.testing.assert_close(found, jacobian.norm(dim=1), rtol=1e-9, atol=1e-14)


def test_the_estimate_is_unbiased_with_the_stated_spread(
    gradient: BatchGradient, batch: Batch, jacobian: torch.Tensor, generator: torch.Generator
) -> None:
    exact = jacobian.norm(dim=1)
    draws = torch.stack([flatten(sensitivities(gradient, batch, 10, generator)) / exact for _ in range(30)])
    squares = draws.square()
    # squares are chi^2_10 / 10: mean 1, variance 2 / 10
    assert (squares.mean(0) - 1).abs().max() < 5.5 * math.sqrt(0.2 / 30)
    assert float(draws.std()) == pytest.approx(1 / math.sqrt(20), rel=0.1)


def test_every_direction_is_one_draw(gradient: BatchGradient, batch: Batch, jacobian: torch.Tensor) -> None:
    found = flatten(sensitivities(gradient, batch, 3, torch.Generator().manual_seed(5)))
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(batch.images.shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    products = torch.stack([jacobian @ direction.flatten() for direction in drawn])
    torch.testing.assert_close(found, products.square().mean(dim=0).sqrt(), rtol=1e-9, atol=1e-14)


def test_leakage_never_divides_by_zero() -> None:
    n = {"a": torch.tensor([0.0, 1.0, 1.0, 4.0])}
    g = {"a": torch.tensor([0.0, 0.0, -0.5, 2.0])}
    scores = leakage(n, g)["a"]
    torch.testing.assert_close(scores, torch.tensor([0.0, 1e6, 2.0, 2.0]))


def test_bad_numbers_of_directions(gradient: BatchGradient, batch: Batch, generator: torch.Generator) -> None:
    with pytest.raises(ConfigError, match="take 10"):
        sensitivities(gradient, batch, 0, generator)
    with pytest.raises(ConfigError, match="take 10"):
        sensitivities(gradient, batch, 10)
    large = Batch(torch.rand(40, 1, 6, 20, dtype=torch.float64), torch.zeros(40, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"at most 4096.*4800"):
        sensitivities(lambda batch, differentiable: {"a": batch.images.sum()[None]}, large, None)
