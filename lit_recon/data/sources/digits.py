"""The handwritten digits that scikit-learn brings along: real images without a download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from lit_recon.data.dataset import ImageSet
from lit_recon.data.sources.base import DIGITS, ImageSource
from lit_recon.data.splits import hold_out
from lit_recon.errors import ConfigError


@dataclass(frozen=True)
class Digits(ImageSource):
    """1,797 gray 8x8 images of ten digits, 80 % for training and 20 % for testing.

    The 17 gray levels of the original are spread evenly over 0 to 255.

    Args:
        seed: of the split.
        size: side in pixels, at least 8; larger images are interpolated.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 (the test part of it).
    """

    seed: int = 0
    size: int = 8

    def __post_init__(self) -> None:
        if self.size < 8:
            raise ConfigError(f"Digits: size must be at least 8, the side of the originals; got {self.size}")

    def read(self) -> tuple[ImageSet, ImageSet]:
        from sklearn.datasets import load_digits

        levels, labels = load_digits(return_X_y=True)
        pixels = torch.from_numpy(levels).float().view(-1, 1, 8, 8) * (255 / 16)
        if self.size > 8:
            pixels = nn.functional.interpolate(pixels, size=(self.size, self.size), mode="bicubic", align_corners=False)
        images = pixels.round().clamp(0, 255).to(torch.uint8)
        digits = ImageSet(images, torch.from_numpy(labels.astype(np.int64)), list(DIGITS), self.name)
        split = hold_out(digits.labels, fraction=0.2, seed=self.seed)
        return digits.subset(split["train"], f"{self.name} train"), digits.subset(split["test"], f"{self.name} test")
