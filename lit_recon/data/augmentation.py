"""Random crops and flips of a whole batch at once, on bytes or floats."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Pad every image with black on all sides and cut it back to its size at a random place of its own.

    Args:
        images: `(n, c, h, w)` of any dtype.
        padding: pixels on each side; 0 changes nothing.
        generator: of the `2 n` offsets.

    Returns:
        `(n, c, h, w)`, same dtype and device.
    """
    if padding == 0:
        return images
    n, _, height, width = images.shape
    top, left = torch.randint(2 * padding + 1, (2, n), generator=generator, device=generator.device).to(images.device)
    windows = nn.functional.pad(images, [padding] * 4).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(n, device=images.device), :, top, left]


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image `(n, c, h, w)` from left to right with probability one half."""
    flipped = torch.rand(len(images), generator=generator, device=generator.device).to(images.device) < 0.5
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)
