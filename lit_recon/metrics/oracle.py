"""How near images of one kind lie to each other: what an error has to be compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.metrics.fidelity import pairwise_mse
from lit_recon.metrics.images import check_images

#: Images compared at a time: few enough for their products to stay in memory that is at hand.
_CHUNK = 4_096


@dataclass(frozen=True)
class NearestNeighborOracle:
    """Distances of targets to other images of their kind, in MSE.

    Attributes:
        nearest: to the nearest image, `(n,)` float64: what one would reach who may choose an image knowing the target.
        percentiles: percentiles of the distances to all images, mean over the targets, by percent.
    """

    nearest: Tensor
    percentiles: dict[int, float]

    @classmethod
    def measure(cls, targets: Tensor, images: Tensor, percents: Sequence[int] = (1, 10, 50)) -> NearestNeighborOracle:
        """Compare every target with every image.

        Args:
            targets: `(n, c, h, w)` in [0, 1].
            images: `(N, c, h, w)`, bytes; must not contain the targets.
            percents: of the percentiles.

        Raises:
            ShapeError: targets and images differ in shape, or there are none.

        Source: Balle, Cherubin and Hayes 2022, section V-B and figure 4.

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
        distances = torch.cat([pairwise_mse(targets, chunk / 255) for chunk in images.split(_CHUNK)], dim=1)
        ordered = distances.sort(dim=1).values
        places = {percent: round(percent / 100 * (len(images) - 1)) for percent in percents}
        return cls(ordered[:, 0], {percent: float(ordered[:, place].mean()) for percent, place in places.items()})
