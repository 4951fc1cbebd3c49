"""Baselines that need no attack: the mean of public images, and the public image nearest to each target.

Selecting the nearest image uses the target, so this is no attack. A reconstruction that is no closer to the target than
that image reveals no more than public data do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.metrics.fidelity import pairwise_mse
from lit_recon.metrics.registry import check_images, unit_images

#: Images converted to float64 at a time: few enough for memory to be reused, which makes this four times faster.
_CHUNK = 512
#: Images that the oracle compares at a time: few enough for their products to stay in memory that is at hand.
_ORACLE_CHUNK = 4_096


def _white(public: Tensor) -> float:
    """The pixel value of white in public images, which are checked."""
    if public.dim() != 4 or not len(public):
        raise ShapeError(f"public images must be (N, c, h, w) with N of at least 1; got shape {tuple(public.shape)}")
    if public.dtype == torch.uint8:
        return 255.0
    check_images("public images", public)
    return 1.0


def _check_targets(targets: Tensor, image_shape: torch.Size) -> None:
    check_images("targets", targets)
    if targets.shape[1:] != image_shape:
        raise ShapeError(
            f"targets must have the shape of the public images, {tuple(image_shape)}; got {tuple(targets.shape[1:])}"
        )


@dataclass(frozen=True)
class MeanImage:
    """The mean of public images, `(c, h, w)` float32 in [0, 1]: the guess with the least expected MSE."""

    image: Tensor

    @classmethod
    def from_images(cls, images: Tensor) -> MeanImage:
        """From public images `(N, c, h, w)`, bytes or floats in [0, 1]; a ShapeError for none or others.

        >>> MeanImage.from_images(torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)).image
        tensor([[[0.5000]]])
        """
        white = _white(images)
        total = torch.zeros(images.shape[1:], dtype=torch.float64, device=images.device)
        for chunk in torch.split(images, _CHUNK):
            total += chunk.double().sum(0)
        return cls((total / (len(images) * white)).float().clamp(0, 1))

    def query(self, targets: Tensor) -> Tensor:
        """The same guess for every target `(n, c, h, w)`, in their shape; a ShapeError for images of another one."""
        _check_targets(targets, self.image.shape)
        return self.image.to(targets.device).expand_as(targets)


class NearestPublic:
    """The public image nearest to a target in MSE, found exactly.

    Public images are `(N, c, h, w)`, bytes or floats in [0, 1], and none of the targets; a ShapeError for others.
    """

    def __init__(self, images: Tensor) -> None:
        self.images, self._white = images, _white(images)

    def query(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Indices `(n,)` of the nearest images, and those images, float32, of targets `(n, c, h, w)` in [0, 1].

        >>> public = torch.tensor([0, 102, 255], dtype=torch.uint8).reshape(3, 1, 1, 1)
        >>> indices, images = NearestPublic(public).query(torch.full((1, 1, 1, 1), 0.5))
        >>> indices.tolist(), images.flatten().tolist()
        ([1], [0.4000000059604645])
        """
        _check_targets(targets, self.images.shape[1:])
        wanted = targets.to(self.images.device).double() * self._white
        least = wanted.new_full((len(wanted),), torch.inf)
        nearest = torch.zeros_like(least, dtype=torch.int64)
        for start, chunk in zip(range(0, len(self.images), _CHUNK), torch.split(self.images, _CHUNK), strict=True):
            error, index = pairwise_mse(wanted, chunk).min(dim=1)
            closer = error < least
            least = torch.where(closer, error, least)
            nearest = torch.where(closer, index + start, nearest)
        return nearest.to(targets.device), unit_images(self.images[nearest]).float().to(targets.device)


@dataclass(frozen=True)
class NearestNeighborOracle:
    """Distances of targets to other images of their kind, in MSE.

    Attributes:
        nearest: distances to the nearest image, `(n,)` float64.
        percentiles: percentiles of the distances to all images, mean over the targets, by percent.
    """

    nearest: Tensor
    percentiles: dict[int, float]

    @classmethod
    def measure(cls, targets: Tensor, images: Tensor, percents: Sequence[int] = (1, 10, 50)) -> NearestNeighborOracle:
        """Compare every target `(n, c, h, w)` in [0, 1] with every image `(N, c, h, w)` in bytes, none a target.

        A ShapeError says that targets and images differ in shape, or there are none.

        Source: [Balle2022], section V-B and figure 4.

        >>> images = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(3, 1, 1, 1)
        >>> oracle = NearestNeighborOracle.measure(torch.zeros(1, 1, 1, 1), images[1:], percents=[100])
        >>> [round(value, 4) for value in (*oracle.nearest.tolist(), oracle.percentiles[100])]
        [0.04, 1.0]
        """
        check_images("targets", targets)
        if images.dtype != torch.uint8 or images.shape[1:] != targets.shape[1:] or not len(images) or not len(targets):
            raise ShapeError(
                "the oracle compares targets (n, c, h, w) in [0, 1] with images (N, c, h, w) in bytes; got "
                f"{tuple(targets.shape)} and {images.dtype} {tuple(images.shape)}"
            )
        distances = torch.cat([pairwise_mse(targets, chunk / 255) for chunk in images.split(_ORACLE_CHUNK)], dim=1)
        ordered = distances.sort(dim=1).values
        places = {percent: round(percent / 100 * (len(images) - 1)) for percent in percents}
        return cls(ordered[:, 0], {percent: float(ordered[:, place].mean()) for percent, place in places.items()})
