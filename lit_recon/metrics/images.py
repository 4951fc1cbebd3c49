"""Checks of the images that metrics compare."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.errors import ShapeError


def check_images(name: str, images: Tensor) -> None:
    """Refuse anything but finite float images `(n, c, h, w)` in [0, 1]; a batch of none is fine.

    Raises:
        ShapeError: names the argument, what it must be and what it is.
    """
    if images.dim() != 4 or not images.is_floating_point():
        raise ShapeError(
            f"{name} must be float images (n, c, h, w); got {images.dtype} of shape {tuple(images.shape)}: "
            "convert with unit_images()"
        )
    if not images.numel():
        return
    if not torch.isfinite(images).all():
        raise ShapeError(f"{name} holds NaN or infinite pixels: scores need finite images in [0, 1]")
    low, high = images.min().item(), images.max().item()
    if low < 0 or high > 1:
        raise ShapeError(
            f"{name} must lie in [0, 1]; got pixels from {low:.4g} to {high:.4g}: clamp or undo the normalization first"
        )


def check_pairs(images: Tensor, targets: Tensor) -> None:
    """Refuse two batches that are not valid images of equal shape.

    Raises:
        ShapeError: if either is no batch of images in [0, 1], or the shapes differ.
    """
    check_images("images", images)
    check_images("targets", targets)
    if images.shape != targets.shape:
        raise ShapeError(
            f"images and targets must pair up; got shapes {tuple(images.shape)} and {tuple(targets.shape)}"
        )


def unit_images(images: Tensor) -> Tensor:
    """Float images in [0, 1] from bytes in 0..255; float images are checked and returned as they are.

    Raises:
        ShapeError: if the images are neither bytes nor floats in [0, 1], or not `(n, c, h, w)`.
    """
    unit = images.float() / 255 if images.dtype == torch.uint8 else images
    check_images("images", unit)
    return unit
