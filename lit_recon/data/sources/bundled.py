"""Images bundled with scikit-learn: handwritten digits, and crops of two photographs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lit_recon.data.dataset import ImageSet
from lit_recon.data.sources.base import ImageSource
from lit_recon.errors import ConfigError


@dataclass(frozen=True)
class Digits(ImageSource):
    """1,797 gray 8x8 images of ten digits in 17 gray levels, 80 % for training and 20 % for testing.

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
        digits = ImageSet(images, torch.from_numpy(labels.astype(np.int64)), list("0123456789"), self.name)
        return self._held_out(digits, 0.2, self.seed)


#: Both photographs in pixels.
_HEIGHT, _WIDTH = 427, 640
#: Classes of each photograph: horizontal bands of equal height.
_BANDS = 4


@dataclass(frozen=True)
class Photos(ImageSource):
    """Square color crops of `china.jpg` (a pagoda above a lake) and `flower.jpg` (a dahlia), shrunk by averaging.

    Test images come from the left halves of the photographs, without overlap, training images from the right halves,
    where they overlap. The eight classes are the photograph and the quarter of its height in which the center of the
    crop lies. The default settings give 1,064 training and 24 test images.

    Args:
        side: of an image in pixels; two crops must fit above each other.
        scale: every image pixel is the mean of `scale` x `scale` pixels of the photograph.
        stride: image pixels between neighboring training crops.

    Source: `sklearn.datasets.load_sample_images`; photographs by the flickr users danielbuechele (china.jpg) and
    vultilion (flower.jpg), licensed under CC BY 2.0.
    """

    side: int = 32
    scale: int = 3
    stride: int = 4

    def __post_init__(self) -> None:
        if min(self.side, self.scale, self.stride) < 1:
            raise ConfigError(
                "Photos: side, scale and stride must be at least 1; "
                f"got side={self.side}, scale={self.scale}, stride={self.stride}"
            )
        largest = _HEIGHT // self.scale // 2
        if self.side > largest:
            raise ConfigError(
                f"Photos: side must be at most {largest} at scale={self.scale}, so that two crops fit above each other "
                f"in a photograph of {_WIDTH}x{_HEIGHT}; got {self.side}: lower side or scale"
            )

    def read(self) -> tuple[ImageSet, ImageSet]:
        from sklearn.datasets import load_sample_images

        photos = [_shrunk(np.asarray(photo), self.scale) for photo in load_sample_images().images]
        middle = _WIDTH // 2 // self.scale
        # test crops side by side, as many as fit, up to the middle; training crops from there on
        first_column = middle % self.side
        test = self._crops([photo[..., first_column:middle] for photo in photos], self.side, "test")
        train = self._crops([photo[..., middle:] for photo in photos], self.stride, "train")
        return train, test

    def _crops(self, photos: list[Tensor], stride: int, part: str) -> ImageSet:
        images, labels = [], []
        for number, photo in enumerate(photos):
            height = photo.shape[1]
            rows = photo.unfold(1, self.side, stride)  # (c, rows, w, size)
            crops = rows.unfold(2, self.side, stride).permute(1, 2, 0, 3, 4)  # (rows, columns, c, size, size)
            center = stride * torch.arange(len(crops)) + self.side / 2
            band = (center * _BANDS / height).long()
            images.append(crops.flatten(0, 1))
            labels.append((_BANDS * number + band).repeat_interleave(crops.shape[1]))
        names = [f"{name} {band + 1}" for name in ("china", "flower") for band in range(_BANDS)]
        return ImageSet(torch.cat(images).contiguous(), torch.cat(labels), names, f"{self.name} {part}")


def _shrunk(photo: NDArray[np.uint8], scale: int) -> Tensor:
    """Means over squares of `scale` pixels: uint8 `(c, h, w)` from `(scale h, scale w, c)`, the rest cut off."""
    height, width = photo.shape[0] // scale, photo.shape[1] // scale
    cells = torch.from_numpy(photo[: height * scale, : width * scale].astype(np.float32))
    means = cells.view(height, scale, width, scale, -1).mean(dim=(1, 3))
    return means.round().to(torch.uint8).permute(2, 0, 1)
