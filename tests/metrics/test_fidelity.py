from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.metrics.fidelity import mse, pairwise_mse, psnr, rmse, ssim

SCORES = [mse, rmse, psnr, ssim]


def noisy_pairs(n: int, c: int, h: int, w: int) -> tuple[Tensor, Tensor]:
    """Smooth targets, and images that stray from them a little more from pair to pair."""
    generator = torch.Generator().manual_seed(100 * h + w)
    coarse = torch.rand(n, c, 4, 4, generator=generator)
    targets = torch.nn.functional.interpolate(coarse, (h, w), mode="bilinear")
    strength = torch.linspace(0.02, 0.5, n)[:, None, None, None]
    return (targets + strength * torch.randn(n, c, h, w, generator=generator)).clamp(0, 1), targets


def skimage_ssim(image: Tensor, target: Tensor, sigma: float) -> float:
    from skimage.metrics import structural_similarity

    arrays = (x.double().numpy() for x in (image, target))
    settings = {"channel_axis": 0, "data_range": 1.0, "gaussian_weights": True, "use_sample_covariance": False}
    return float(structural_similarity(*arrays, sigma=sigma, **settings))


@pytest.mark.parametrize("shape", [(4, 3, 32, 32), (4, 1, 28, 28), (3, 3, 17, 12), (2, 1, 11, 40)])
def test_ssim_agrees_with_scikit_image(shape: tuple[int, int, int, int]) -> None:
    images, targets = noisy_pairs(*shape)
    expected = [skimage_ssim(image, target, 1.5) for image, target in zip(images, targets, strict=True)]
    np.testing.assert_allclose(ssim(images, targets), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("shape", "radius"), [((4, 1, 8, 8), 3), ((2, 3, 10, 20), 4), ((2, 1, 9, 7), 3), ((2, 1, 3, 5), 1)]
)
def test_ssim_of_small_images_uses_the_window_that_fits(shape: tuple[int, int, int, int], radius: int) -> None:
    images, targets = noisy_pairs(*shape)
    # scikit-image derives the same radius from this sigma: int(3.5 * sigma + 0.5).
    expected = [skimage_ssim(image, target, radius / 3.5) for image, target in zip(images, targets, strict=True)]
    np.testing.assert_allclose(ssim(images, targets), expected, rtol=1e-10)


def test_psnr_and_mse_agree_with_scikit_image() -> None:
    from skimage.metrics import mean_squared_error, peak_signal_noise_ratio

    images, targets = noisy_pairs(5, 3, 16, 16)
    pairs = list(zip(targets.double().numpy(), images.double().numpy(), strict=True))
    np.testing.assert_allclose(mse(images, targets), [mean_squared_error(*pair) for pair in pairs], rtol=1e-12)
    np.testing.assert_allclose(rmse(images, targets) ** 2, mse(images, targets), rtol=1e-12)
    expected = [peak_signal_noise_ratio(*pair, data_range=1.0) for pair in pairs]
    np.testing.assert_allclose(psnr(images, targets), expected, rtol=1e-12)


@pytest.mark.parametrize(("score", "perfect"), [(mse, 0.0), (rmse, 0.0), (psnr, torch.inf), (ssim, 1.0)])
def test_equal_images_score_perfectly(score: Callable[[Tensor, Tensor], Tensor], perfect: float) -> None:
    images = torch.rand(3, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    assert score(images, images.clone()).tolist() == pytest.approx([perfect] * 3, abs=1e-12)


@pytest.mark.parametrize(("score", "worst"), [(mse, 1.0), (rmse, 1.0), (psnr, 0.0)])
def test_black_for_white_scores_worst(score: Callable[[Tensor, Tensor], Tensor], worst: float) -> None:
    assert score(torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8)).tolist() == pytest.approx([worst], abs=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_one_figure_per_pair_whatever_the_company(score: Callable[[Tensor, Tensor], Tensor]) -> None:
    images, targets = noisy_pairs(4, 3, 13, 13)
    together = score(images, targets)
    alone = torch.cat([score(images[i : i + 1], targets[i : i + 1]) for i in range(4)])
    assert together.shape == (4,)
    assert together.dtype == torch.float64
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize("score", SCORES)
def test_an_empty_batch_has_no_figures(score: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert score(torch.zeros(0, 3, 8, 8), torch.zeros(0, 3, 8, 8)).shape == (0,)


@pytest.mark.parametrize("score", SCORES)
def test_images_outside_the_unit_range_are_refused(score: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ShapeError, match=r"targets must lie in \[0, 1\]"):
        score(torch.rand(1, 1, 8, 8), torch.full((1, 1, 8, 8), 1.5))


@pytest.mark.parametrize(
    ("value", "remedy"), [(128.0, "divide by 255, or give bytes"), (-2.0, "undo the normalization"), (1.5, "undo the")]
)
def test_a_refusal_says_how_to_come_into_the_range(value: float, remedy: str) -> None:
    with pytest.raises(ShapeError, match=remedy):
        rmse(torch.rand(1, 1, 8, 8), torch.tensor([0.0, value] * 32).view(1, 1, 8, 8))


def test_images_too_small_for_a_window_are_refused() -> None:
    with pytest.raises(ShapeError, match="at least 3 x 3 pixels; got 2 x 8"):
        ssim(torch.rand(1, 1, 2, 8), torch.rand(1, 1, 2, 8))


def test_a_tiny_error_is_still_told_from_none() -> None:
    target = torch.full((1, 1, 8, 8), 0.5)
    nearly = target.clone()
    nearly[0, 0, 0, 0] += 2**-20
    assert psnr(nearly, target).item() == pytest.approx(-10 * np.log10(2.0**-40 / 64), rel=1e-9)


def test_pairwise_errors_agree_with_scipy() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.rand(4, 3, 5, 6, generator=generator), torch.rand(7, 3, 5, 6, generator=generator)
    expected = cdist(a.flatten(1).numpy(), b.flatten(1).numpy(), "sqeuclidean") / 90
    np.testing.assert_allclose(pairwise_mse(a, b), expected, rtol=1e-6)
    np.testing.assert_allclose(pairwise_mse(a, a).diag(), 0, atol=1e-14)
