"""Weights on a common scale, with those that no image moves left out of account."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.errors import ShapeError

#: A coordinate whose spread is below this share of the largest one is constant up to rounding: pixels that are black
#: in every image leave their weights to it.
_DEAD = 1e-4


@dataclass(frozen=True, eq=False)
class Standardization:
    """Each coordinate less its mean, over its standard deviation; dead coordinates are 0 whatever they hold.

    Attributes:
        mean: `(p,)` float64.
        scale: `(p,)` float64, 0 for dead coordinates.

    Source: Balle, Cherubin and Hayes 2022, section V-A; there a constant coordinate is divided by its rounding error.
    """

    mean: Tensor
    scale: Tensor

    @classmethod
    def fitted(cls, differences: Tensor) -> Standardization:
        """Of shadow models `(s, p)`.

        Raises:
            ShapeError: there are fewer than two, or they do not differ.

        >>> rows = torch.tensor([[1.0, 5.0], [3.0, 5.0], [5.0, 5.0]])
        >>> Standardization.fitted(rows)(rows).tolist()
        [[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
        """
        exact = differences.double()
        if exact.dim() != 2 or len(exact) < 2 or not exact.std(dim=0).max() > 0:
            raise ShapeError(f"standardization needs two or more different models (s, p); got {tuple(exact.shape)}")
        deviation = exact.std(dim=0)
        alive = deviation > _DEAD * deviation.max()
        return cls(exact.mean(dim=0), torch.where(alive, 1 / deviation, 0.0))

    def __call__(self, differences: Tensor) -> Tensor:
        """Features `(m, p)`, float32.

        Raises:
            ShapeError: the models have another number of weights, or a weight is NaN or infinite.
        """
        if differences.dim() != 2 or differences.shape[1:] != self.mean.shape or not torch.isfinite(differences).all():
            raise ShapeError(
                f"differences must be finite, (m, {len(self.mean)}); got {tuple(differences.shape)}: "
                "are they of another network?"
            )
        return ((differences.double() - self.mean) * self.scale).float()
