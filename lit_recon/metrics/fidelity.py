"""Pixel metrics of matched pairs, in float64 to tell nearly perfect from perfect: MSE, RMSE, PSNR and SSIM."""

from __future__ import annotations

import lit_recon._torchvision

import torch
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from lit_recon.errors import ShapeError
from lit_recon.measures import MEASURES
from lit_recon.metrics.registry import Metric, check_pairs, register

#: Radius in pixels and standard deviation of the Gaussian window of [Wang2004].
_RADIUS, _SIGMA = 5, 1.5
_TRUNCATE = 3.5  # standard deviations at which the window ends, as in torchmetrics and scikit-image


def mse(images: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error over channels and pixels, `(n,)` float64 in [0, 1].

    Images and targets are pairs `(n, c, h, w)` in [0, 1]; a ShapeError says that they are not.

    >>> mse(torch.zeros(2, 3, 8, 8), torch.full((2, 3, 8, 8), 0.5)).tolist()
    [0.25, 0.25]
    """
    check_pairs(images, targets)
    return (images.double() - targets.double()).square().mean(dim=(1, 2, 3))


def rmse(images: Tensor, targets: Tensor) -> Tensor:
    """Root mean squared error of each pair, `(n,)` float64 in [0, 1]; arguments and errors as for `mse`."""
    return mse(images, targets).sqrt()


def psnr(images: Tensor, targets: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB with peak 1, infinite for equal images; arguments and errors as for `mse`.

    >>> psnr(torch.zeros(1, 1, 8, 8), torch.full((1, 1, 8, 8), 0.1)).round(decimals=4).tolist()
    [20.0]
    """
    return -10 * mse(images, targets).log10()


def ssim(images: Tensor, targets: Tensor) -> Tensor:
    """Structural similarity, `(n,)` float64 in [-1, 1]: Gaussian window of 11 pixels, K1 = 0.01, K2 = 0.03, range 1.

    Only windows inside the image count, and channels are averaged, as in scikit-image (with Gaussian weights and
    `use_sample_covariance=False`). Images with a side `s` below 11 pixels get the largest odd window that fits, of
    radius `r = (s - 1) // 2` and standard deviation `r / 3.5`: their values compare among themselves only.

    Arguments and errors as for `mse`; also a ShapeError for sides below 3 pixels. Source: [Wang2004], section III.

    >>> image = torch.linspace(0, 1, 256).reshape(1, 1, 16, 16)
    >>> ssim(torch.cat([image, image]), torch.cat([image, 1 - image])).round(decimals=2).tolist()
    [1.0, -0.83]
    """
    check_pairs(images, targets)
    radius = min(_RADIUS, (min(images.shape[2:]) - 1) // 2)
    if radius < 1:
        raise ShapeError(f"ssim needs images of at least 3 x 3 pixels; got {images.shape[2]} x {images.shape[3]}")
    if not len(images):
        return images.new_zeros(0).double()
    _, similarity = structural_similarity_index_measure(
        images.double(),
        targets.double(),
        sigma=_SIGMA if radius == _RADIUS else radius / _TRUNCATE,
        data_range=1.0,
        return_full_image=True,
    )
    return similarity[..., radius:-radius, radius:-radius].mean(dim=(1, 2, 3))


def pairwise_mse(images: Tensor, others: Tensor) -> Tensor:
    """MSE of every pair of images `(n, c, h, w)` and `(m, c, h, w)`, by one matrix product: `(n, m)` float64.

    Rounding may give some 1e-16 instead of 0 for equal images.
    """
    a, b = images.double().flatten(1), others.double().flatten(1)
    norms = [torch.einsum("id,id->i", rows, rows) for rows in (a, b)]
    squares = norms[0][:, None] + norms[1][None, :] - 2 * a @ b.T
    return squares.clamp(min=0) / a.shape[1]


@register
class MSE(Metric):
    """See `mse`."""

    measure = MEASURES["mse"]
    __call__ = staticmethod(mse)


@register
class RMSE(Metric):
    """See `rmse`."""

    measure = MEASURES["rmse"]
    __call__ = staticmethod(rmse)


@register
class PSNR(Metric):
    """See `psnr`."""

    measure = MEASURES["psnr"]
    __call__ = staticmethod(psnr)


@register
class SSIM(Metric):
    """See `ssim`."""

    measure = MEASURES["ssim"]
    __call__ = staticmethod(ssim)
