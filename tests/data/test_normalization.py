"""Measured statistics against NumPy's on floats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lit_recon.data.dataset import ImageSet, measure_normalization
from lit_recon.errors import ShapeError


def image_set(array: np.ndarray) -> ImageSet:
    return ImageSet(torch.from_numpy(array), torch.zeros(len(array), dtype=torch.int64), ["a"], "toy")


@pytest.mark.parametrize("n", [1, 7, 1500])
@pytest.mark.parametrize("channels", [1, 3])
def test_equals_numpy(n: int, channels: int) -> None:
    rng = np.random.default_rng(n)
    array = (rng.beta(2, 5, (n, channels, 4, 3)) * 255).astype(np.uint8)
    measured = measure_normalization(image_set(array))
    pixels = array.astype(np.float64) / 255
    np.testing.assert_allclose(measured.mean, pixels.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(measured.std, pixels.std(axis=(0, 2, 3)), rtol=1e-12)


def test_black_and_white() -> None:
    measured = measure_normalization(image_set(np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)))
    assert measured.mean == pytest.approx((0.5,))
    assert measured.std == pytest.approx((0.5,))


@pytest.mark.parametrize("level", [0, 77, 255])
def test_refuses_a_constant_channel(level: int) -> None:
    array = np.random.default_rng(0).integers(0, 256, (3, 3, 2, 2), dtype=np.uint8)
    array[:, 1] = level
    with pytest.raises(ShapeError, match="toy: every pixel of a channel has the same value"):
        measure_normalization(image_set(array))
