from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.metrics.registry import check_images, check_pairs, unit_images


@pytest.mark.parametrize(
    ("images", "complaint"),
    [
        (torch.rand(3, 8, 8), r"shape \(3, 8, 8\)"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "torch.uint8"),
        (torch.full((1, 1, 2, 2), 255.0), r"pixels from 255 to 255"),
        (torch.full((1, 1, 2, 2), -0.01), r"pixels from -0.01"),
        (torch.full((1, 1, 2, 2), torch.nan), "NaN"),
        (torch.full((1, 1, 2, 2), torch.inf), "infinite"),
    ],
)
def test_what_is_no_batch_of_images_is_refused(images: Tensor, complaint: str) -> None:
    with pytest.raises(ShapeError, match=complaint):
        check_images("targets", images)


def test_the_borders_of_the_range_and_an_empty_batch_are_fine() -> None:
    check_images("targets", torch.tensor([0.0, 1.0]).reshape(1, 1, 1, 2))
    check_images("targets", torch.zeros(0, 3, 8, 8))


def test_pairs_of_different_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 1, 8, 8\) and \(3, 1, 8, 8\)"):
        check_pairs(torch.rand(2, 1, 8, 8), torch.rand(3, 1, 8, 8))


def test_bytes_become_unit_floats() -> None:
    values = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 1, 1, 3)
    torch.testing.assert_close(unit_images(values).flatten(), torch.tensor([0.0, 0.2, 1.0]))


def test_unit_floats_are_returned_as_they_are() -> None:
    images = torch.rand(2, 1, 3, 3)
    assert unit_images(images) is images
    with pytest.raises(ShapeError, match=r"\[0, 1\]"):
        unit_images(2 + images)
