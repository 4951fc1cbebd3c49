"""The image set: what it accepts, and that pixels come out as they went in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_recon.data.dataset import ImageSet
from lit_recon.errors import ShapeError

BYTES = torch.arange(4 * 3 * 2 * 2, dtype=torch.uint8).view(4, 3, 2, 2)
LABELS = torch.tensor([0, 1, 2, 0])
NAMES = ["a", "b", "c"]


def test_reports_shape_and_size() -> None:
    images = ImageSet(BYTES, LABELS, NAMES, "toy train")
    assert len(images) == 4
    assert images.image_shape == (3, 2, 2)
    assert images.n_classes == 3
    assert repr(images) == "ImageSet('toy train', 4 images (3, 2, 2), 3 classes)"


def test_pixels_are_float32_in_the_unit_interval() -> None:
    extremes = torch.tensor([0, 255, 51, 102], dtype=torch.uint8).view(1, 1, 2, 2)
    pixels = ImageSet(extremes, torch.tensor([0]), ["a"], "toy").pixels(torch.tensor([0, 0]))
    assert pixels.dtype == torch.float32
    assert pixels[1].flatten().tolist() == pytest.approx([0, 1, 0.2, 0.4], abs=1e-7)


def test_pixels_select_images_and_leave_the_set_untouched() -> None:
    images = ImageSet(BYTES.clone(), LABELS, NAMES, "toy")
    chosen = images.pixels(torch.tensor([2, 0]))
    assert torch.equal((chosen * 255).round().to(torch.uint8), BYTES[[2, 0]])
    chosen.zero_()
    images.pixels().zero_()
    assert torch.equal(images.images, BYTES)


def test_all_pixels_by_default() -> None:
    images = ImageSet(BYTES, LABELS, NAMES, "toy")
    assert torch.equal(images.pixels(), images.pixels(torch.arange(4)))


def test_subset_keeps_order_and_classes() -> None:
    chosen = ImageSet(BYTES, LABELS, NAMES, "toy").subset(torch.tensor([3, 1]), "toy part")
    assert chosen.labels.tolist() == [0, 1]
    assert torch.equal(chosen.images, BYTES[[3, 1]])
    assert chosen.class_names == NAMES
    assert chosen.name == "toy part"


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (BYTES.float(), LABELS, r"images must be uint8 .* got torch.float32"),
        (BYTES[0], LABELS, r"images must be uint8 \(N, c, h, w\)"),
        (BYTES.permute(0, 2, 3, 1), LABELS, "1 or 3 channels"),
        (BYTES, LABELS.int(), "labels must be int64 .* got torch.int32"),
        (BYTES, LABELS[:3], r"labels must be int64 \(4,\)"),
        (BYTES[:0], LABELS[:0], "at least one image"),
        (BYTES, torch.tensor([0, 1, 3, 0]), r"labels must be 0 to 2.* got 0 to 3"),
        (BYTES, torch.tensor([0, 1, -1, 0]), r"labels must be 0 to 2.* got -1 to 1"),
    ],
)
def test_refuses_what_is_not_labeled_images(images: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        ImageSet(images, labels, NAMES, "toy")


@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_have_channels_last(channels: int) -> None:
    array = np.random.default_rng(0).integers(0, 256, (4, 5, 6, channels), dtype=np.uint8)
    images = ImageSet.from_arrays(array, LABELS.numpy().astype(np.uint8), NAMES, "toy")
    assert images.image_shape == (channels, 5, 6)
    assert images.labels.dtype == torch.int64
    assert all(images.images[n, c, y, x] == array[n, y, x, c] for n, c, y, x in [(0, 0, 1, 2), (3, channels - 1, 4, 5)])


def test_arrays_without_channel_axis_are_gray() -> None:
    array = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    images = ImageSet.from_arrays(array, LABELS.numpy(), NAMES, "toy")
    assert images.image_shape == (1, 5, 3)
    assert np.array_equal(images.images[:, 0].numpy(), array)


def test_arrays_are_copied() -> None:
    array = np.zeros((4, 5, 5, 1), dtype=np.uint8)
    images = ImageSet.from_arrays(array, LABELS.numpy(), NAMES, "toy")
    array[:] = 9
    assert not images.images.any()


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((4, 2, 2, 3), np.float32), LABELS.numpy(), r"got float32: .*np\.round\(images \* 255\)"),
        (np.zeros((4, 3, 2, 2), np.uint8), LABELS.numpy(), r"transpose\(0, 2, 3, 1\)"),
        (np.zeros((4, 2, 2), np.int64), LABELS.numpy(), r"save numbers of 0 to 255 as images\.astype\(np\.uint8\)"),
        (np.zeros((4, 2, 2), bool), LABELS.numpy(), r"black and white as \(images \* 255\)\.astype"),
        (
            np.zeros((4, 2, 2, 4), np.uint8),
            LABELS.numpy(),
            r"images must be \(N, h, w, 1\).* save images\[\.\.\., :3\]",
        ),
        (np.zeros((4, 12), np.uint8), LABELS.numpy(), r"got \(4, 12\)"),
        (np.zeros((4, 2, 2), np.uint8), np.eye(4, dtype=int), r"one-hot rows as labels\.argmax\(1\)"),
        (np.zeros((4, 2, 2), np.uint8), LABELS.numpy().astype(float), "labels must be integers .* got float64"),
    ],
)
def test_refuses_other_arrays_and_names_the_remedy(images: np.ndarray, labels: np.ndarray, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        ImageSet.from_arrays(images, labels, NAMES, "toy")
