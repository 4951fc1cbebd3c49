"""Priors against plain loops over pixels and layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lit_recon.attacks.updates import (
    BatchNormPrior,
    GradientMatching,
    GroupConsistency,
    Prior,
    SquaredNorm,
    TotalVariation,
)
from lit_recon.errors import ConfigError, ThreatModelError
from lit_recon.records import LayerStatistics, Normalization, Observation

GREY = Normalization((0.5, 0.4), (0.25, 0.5))


@pytest.fixture
def images() -> torch.Tensor:
    """Four problems (two victims, two restarts each) of three images."""
    return torch.rand(4, 3, 2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_total_variation(images: torch.Tensor) -> None:
    values = TotalVariation(1.0)(images, GREY, 2, 0.5)
    for p in range(4):
        across, down = [], []
        for n in range(3):
            for c, std in enumerate(GREY.std):
                picture = images[p, n, c] / std
                across += [abs(picture[i, j + 1] - picture[i, j]) for i in range(5) for j in range(3)]
                down += [abs(picture[i + 1, j] - picture[i, j]) for i in range(4) for j in range(4)]
        expected = sum(across) / len(across) + sum(down) / len(down)
        assert float(values[p]) == pytest.approx(float(expected), rel=1e-12)


def test_flat_images_have_no_variation() -> None:
    assert not TotalVariation(1.0)(torch.full((2, 1, 2, 5, 5), 0.3), GREY, 1, 0.0).any()


def test_a_side_of_one_pixel_has_no_variation(images: torch.Tensor) -> None:
    prior, row = TotalVariation(1.0), images[..., :1, :]
    across = row.diff(dim=-1).abs() / torch.tensor(GREY.std, dtype=row.dtype).view(2, 1, 1)
    torch.testing.assert_close(prior(row, GREY, 2, 0.5), across.flatten(1).mean(1))
    torch.testing.assert_close(prior(row.transpose(-1, -2), GREY, 2, 0.5), across.flatten(1).mean(1))
    assert not prior(row[..., :1], GREY, 2, 0.5).any()


def test_total_variation_falls_to_zero() -> None:
    images = torch.rand(2, 1, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    whole = TotalVariation(1.0)(images, GREY, 1, 0.7)
    for progress, share in ((0.0, 1.0), (0.1, 0.75), (0.4, 0.0), (0.9, 0.0)):
        found = TotalVariation(1.0, until=0.4)(images, GREY, 1, progress)
        assert torch.allclose(found, share * whole, atol=1e-7)
    with pytest.raises(ConfigError, match="`until` above 0 and at most 1; got 0"):
        TotalVariation(1.0, until=0.0)


def test_squared_norm_is_zero_at_the_mean_image(images: torch.Tensor) -> None:
    mean = torch.tensor(GREY.mean, dtype=torch.float64).view(2, 1, 1).expand(1, 3, 2, 5, 4)
    assert float(SquaredNorm(1.0)(mean, GREY, 1, 0.0)) == pytest.approx(0, abs=1e-12)
    one_std_off = mean + torch.tensor(GREY.std, dtype=torch.float64).view(2, 1, 1)
    assert float(SquaredNorm(1.0)(one_std_off, GREY, 1, 0.0)) == pytest.approx(1, rel=1e-12)


def test_group_consistency(images: torch.Tensor) -> None:
    prior = GroupConsistency(1.0, start=0.25)
    assert not prior(images, GREY, 2, 0.2).any()
    values = prior(images, GREY, 2, 0.25)
    std = torch.tensor(GREY.std, dtype=torch.float64).view(2, 1, 1)
    for p in range(4):
        victim = images[p // 2 * 2 : p // 2 * 2 + 2]
        expected = ((images[p] - victim.mean(0)) / std).square().mean()
        assert float(values[p]) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("prior", [TotalVariation(1.0), SquaredNorm(1.0), GroupConsistency(1.0)])
def test_image_priors_ignore_the_order_of_a_batch(prior: Prior, images: torch.Tensor) -> None:
    torch.testing.assert_close(prior(images.flip(1), GREY, 2, 0.9), prior(images, GREY, 2, 0.9))


def test_batch_norm_prior_against_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, known = (
        {
            name: LayerStatistics(torch.randn(4, generator=generator), torch.rand(4, generator=generator))
            for name in "ab"
        }
        for _ in range(2)
    )
    relative = 0.0
    for n, factor in (("a", 10.0), ("b", 1.0)):
        floor = known[n].var + 1e-3 * known[n].var.mean()
        off = (ours[n].mean - known[n].mean) ** 2 / floor, ((ours[n].var - known[n].var) / (2 * floor)) ** 2
        relative += factor * float(sum(off).mean())
    assert float(BatchNormPrior(0.3, first_layer=10, relative=True)(ours, known)) == pytest.approx(relative, rel=1e-6)
    assert float(BatchNormPrior(0.3, relative=True)(known, known)) == 0
    expected = sum(
        factor * ((ours[n].mean - known[n].mean).norm() + (ours[n].var - known[n].var).norm())
        for n, factor in (("a", 10.0), ("b", 1.0))
    )
    assert float(BatchNormPrior(0.3, first_layer=10)(ours, known)) == pytest.approx(float(expected), rel=1e-6)
    assert float(BatchNormPrior(0.3)(known, known)) < 1e-15


def test_batch_norm_prior_takes_the_best_statistics_known(observe: Callable[..., Observation]) -> None:
    exact = observe("resnet", "train", "batch")
    assert BatchNormPrior(1.0).targets(exact) is exact.batch_statistics
    running = observe("resnet", "train", "running")
    targets = BatchNormPrior(1.0).targets(running)
    assert set(targets) == set(exact.batch_statistics)
    assert all(torch.equal(layer.var, running.buffers[f"{name}.running_var"]) for name, layer in targets.items())


@pytest.mark.parametrize(("kind", "batch_norm"), [("resnet", "none"), ("mlp", "running")])
def test_batch_norm_prior_needs_statistics(observe: Callable[..., Observation], kind: str, batch_norm: str) -> None:
    with pytest.raises(ThreatModelError, match="BatchNormPrior needs"):
        BatchNormPrior(1.0).targets(observe(kind, "train", batch_norm))


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="weight"):
        TotalVariation(-1)
    with pytest.raises(ConfigError, match="weight"):
        BatchNormPrior(1.0, first_layer=-1)
    with pytest.raises(ConfigError, match="start"):
        GroupConsistency(1.0, start=1.0)
    with pytest.raises(ConfigError, match="at most one"):
        GradientMatching(priors=[BatchNormPrior(1.0), BatchNormPrior(1.0)])
