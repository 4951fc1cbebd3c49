"""Augmentation against the slow definition: every result is a window of the padded image, mirrored or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_recon.data.batches import random_crop, random_flip


def random_images(n: int = 6, shape: tuple[int, int, int] = (3, 5, 7)) -> Tensor:
    return torch.randint(1, 256, (n, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def offset(image: Tensor, crop: Tensor, padding: int) -> tuple[int, int]:
    """Where in the padded image the crop was cut."""
    channels, height, width = image.shape
    padded = image.new_zeros(channels, height + 2 * padding, width + 2 * padding)
    padded[:, padding : padding + height, padding : padding + width] = image
    places = [
        (top, left)
        for top in range(2 * padding + 1)
        for left in range(2 * padding + 1)
        if torch.equal(padded[:, top : top + height, left : left + width], crop)
    ]
    assert len(places) == 1
    return places[0]


@pytest.mark.parametrize("padding", [1, 4])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 8, 8)])
def test_crops_are_windows_of_the_padded_image(padding: int, shape: tuple[int, int, int]) -> None:
    images = random_images(shape=shape)
    crops = random_crop(images, padding, torch.Generator().manual_seed(1))
    assert crops.shape == images.shape
    assert crops.dtype == torch.uint8
    places = {offset(image, crop, padding) for image, crop in zip(images, crops, strict=True)}
    assert len(places) > 1


def test_all_offsets_are_equally_likely() -> None:
    image = random_images(1)
    crops = random_crop(image.expand(900, -1, -1, -1), 1, torch.Generator().manual_seed(0))
    places = [offset(image[0], crop, 1) for crop in crops]
    counts = torch.tensor([places.count((top, left)) for top in range(3) for left in range(3)])
    chi_squared = ((counts - 100).square() / 100).sum()
    assert chi_squared < 26.1  # 0.1 % of fair draws with 8 degrees of freedom exceed this


def test_no_padding_changes_nothing() -> None:
    images = random_images()
    assert torch.equal(random_crop(images, 0, torch.Generator()), images)


def test_flips_about_half() -> None:
    images = random_images(400)
    results = random_flip(images, torch.Generator().manual_seed(0))
    flipped = [torch.equal(result, image.flip(2)) for image, result in zip(images, results, strict=True)]
    unchanged = [torch.equal(result, image) for image, result in zip(images, results, strict=True)]
    assert all(a != b for a, b in zip(flipped, unchanged, strict=True))
    assert 160 < sum(flipped) < 240


@pytest.mark.parametrize("augment", [lambda x, g: random_crop(x, 2, g), random_flip])
def test_bytes_and_floats_agree_and_the_input_stays(augment) -> None:  # type: ignore[no-untyped-def]  # two lambdas
    images = random_images()
    before = images.clone()
    first, again, floats = (augment(x, torch.Generator().manual_seed(5)) for x in (images, images, images / 255))
    assert torch.equal(first, again)
    assert torch.equal(first / 255, floats)
    assert not torch.equal(first, augment(images, torch.Generator().manual_seed(6)))
    assert torch.equal(images, before)
