from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial import KDTree
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.metrics import baselines
from lit_recon.metrics.baselines import MeanImage, NearestPublic
from lit_recon.metrics.fidelity import mse

SHAPE = (3, 4, 5)


def public_bytes(n: int = 50) -> Tensor:
    return torch.randint(0, 256, (n, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last one not full."""
    monkeypatch.setattr(baselines, "_CHUNK", 16)


def test_the_mean_image_agrees_with_numpy_for_bytes_and_floats() -> None:
    images = public_bytes()
    expected = images.numpy().astype(np.float64).mean(0) / 255
    np.testing.assert_allclose(MeanImage.from_images(images).image, expected, atol=1e-7)
    np.testing.assert_allclose(MeanImage.from_images(images.float() / 255).image, expected, atol=1e-7)


def test_no_other_constant_guess_has_less_error_than_the_mean_image() -> None:
    images = public_bytes().float() / 255
    mean = MeanImage.from_images(images)
    error = mse(mean.query(images), images).mean()
    for direction in torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(0)):
        other = MeanImage((mean.image + 0.01 * direction).clamp(0, 1))
        assert mse(other.query(images), images).mean() > error


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_the_nearest_image_agrees_with_scipy(dtype: torch.dtype) -> None:
    images = public_bytes()
    unit = images.float() / 255
    targets = torch.rand(12, *SHAPE, generator=torch.Generator().manual_seed(4))
    _, expected = KDTree(unit.flatten(1).numpy()).query(targets.flatten(1).numpy())
    indices, found = NearestPublic(images if dtype == torch.uint8 else unit).query(targets)
    assert indices.tolist() == expected.tolist()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, unit[indices])


def test_a_public_image_is_its_own_nearest() -> None:
    images = public_bytes()
    targets = images.float() / 255
    indices, found = NearestPublic(images).query(targets)
    assert indices.tolist() == list(range(len(images)))
    assert torch.equal(found, targets)


def test_of_equal_public_images_the_first_is_found() -> None:
    images = public_bytes()[:1].repeat(40, 1, 1, 1)
    indices, _ = NearestPublic(images).query(images[:2].float() / 255)
    assert indices.tolist() == [0, 0]


def test_no_target_has_no_neighbor() -> None:
    indices, found = NearestPublic(public_bytes()).query(torch.zeros(0, *SHAPE))
    assert indices.shape == (0,)
    assert found.shape == (0, *SHAPE)


@pytest.mark.parametrize("baseline", [MeanImage.from_images, NearestPublic])
@pytest.mark.parametrize(
    ("images", "complaint"),
    [
        (torch.zeros(0, *SHAPE), "at least 1"),
        (torch.zeros(SHAPE), r"\(N, c, h, w\)"),
        (torch.full((20, *SHAPE), 3.0), r"public images must lie in \[0, 1\]"),
        (torch.zeros(2, *SHAPE, dtype=torch.int64), "torch.int64"),
    ],
)
def test_what_are_no_public_images_is_refused(baseline: type[NearestPublic], images: Tensor, complaint: str) -> None:
    with pytest.raises(ShapeError, match=complaint):
        baseline(images)


def test_targets_of_another_shape_are_refused() -> None:
    targets = torch.rand(1, 3, 4, 4)
    with pytest.raises(ShapeError, match=r"\(3, 4, 5\); got \(3, 4, 4\)"):
        NearestPublic(public_bytes()).query(targets)
    with pytest.raises(ShapeError, match=r"\(3, 4, 5\); got \(3, 4, 4\)"):
        MeanImage.from_images(public_bytes()).query(targets)
