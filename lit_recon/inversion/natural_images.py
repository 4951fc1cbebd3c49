"""What anyone knows of photographs: their spectrum. Enough to fill gaps and to take noise away."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Variance of the mean over variance at the lowest frequency: sets the spectrum's height at frequency zero.
LOWEST_SQUARED_FREQUENCY = 0.3


def cosine_basis(size: int) -> Tensor:
    """Orthonormal DCT-II matrix `(size, size)` in double precision, one frequency per row."""
    places = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi / size * (places[None, :] + 0.5) * places[:, None]) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis


def spectrum(height: int, width: int) -> Tensor:
    """Expected squared cosine coefficients `(h, w)` of a photograph of pixel variance 1: 1 / frequency squared.

    Source: the power spectrum of photographs falls as 1 / frequency squared: Field, Relations between the statistics of
        natural images and the response properties of cortical cells, JOSA A 1987.
    """
    squared = torch.arange(height).double()[:, None] ** 2 + torch.arange(width).double()[None, :] ** 2
    power = 1 / squared.clamp(min=LOWEST_SQUARED_FREQUENCY)
    return power * (height * width / power.sum())


def wiener(images: Tensor, noise: Tensor) -> Tensor:
    """The posterior mean of normalized images under white noise, given the spectrum of photographs.

    Args:
        images: `(n, c, h, w)`, pixel variance about 1.
        noise: `(n,)`, standard deviations; 0 leaves an image as it is.

    Source: the filter of Wiener, with the spectrum of `spectrum`.
    """
    height, width = images.shape[-2:]
    down, across = (cosine_basis(size).to(images) for size in (height, width))
    power = spectrum(height, width).to(images)
    gain = power / (power + noise.square()[:, None, None])
    coefficients: Tensor = down @ images @ across.T
    restored: Tensor = down.T @ (coefficients * gain[:, None]) @ across
    return torch.where((noise > 0)[:, None, None, None], restored, images)


def filled(images: Tensor, known: Tensor, iterations: int = 200) -> Tensor:
    """Images whose unknown pixels are the mean of their four neighbours: the smoothest that fit.

    Args:
        images, known: `(n, c, h, w)`; the mask is boolean. A channel without a known pixel becomes 0.
        iterations: of averaging; the influence of a known pixel moves one pixel in each.
    """
    if known.all():
        return images
    count = known.sum(dim=(2, 3), keepdim=True)
    mean = torch.where(known, images, 0.0).sum(dim=(2, 3), keepdim=True) / count.clamp(min=1)
    result = torch.where(known, images, mean)
    for _ in range(iterations):
        padded = torch.nn.functional.pad(result, (1, 1, 1, 1), mode="replicate")
        around = padded[..., 1:-1, :-2] + padded[..., 1:-1, 2:] + padded[..., :-2, 1:-1] + padded[..., 2:, 1:-1]
        result = torch.where(known, images, around / 4)
    return result
