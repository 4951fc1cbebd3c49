"""Per-channel statistics of a set of images."""

from __future__ import annotations

import torch

from lit_recon.data.dataset import ImageSet
from lit_recon.errors import ShapeError
from lit_recon.records import Normalization


def measure_normalization(images: ImageSet) -> Normalization:
    """Mean and (biased) standard deviation of each channel over all pixels, in units of [0, 1].

    Counted from the histogram of the 256 levels, so that the result does not depend on the order of summation.

    Raises:
        ShapeError: if a channel is constant, since nothing can be divided by its standard deviation.
    """
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in range(images.image_shape[0]):
        counts = torch.zeros(256, dtype=torch.int64)
        for chunk in images.images[:, channel].split(1024):
            counts += torch.bincount(chunk.flatten(), minlength=256)
        weights = counts.double() / counts.sum()
        mean = (weights * levels).sum()
        variance = (weights * (levels - mean).square()).sum()
        means.append(mean.item())
        stds.append(variance.sqrt().item())
    if min(stds) == 0:
        raise ShapeError(
            f"{images.name}: every pixel of a channel has the same value (means {means}); use other images"
        )
    return Normalization(tuple(means), tuple(stds))
