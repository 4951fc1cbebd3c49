"""Rows of gradients with noise of heavy tails, as that whose size depends on the images.

Least squares follow outliers, and so in part do rows of low rank in which outliers are pulled in. Rows around the best
fit of given patches are those of the likelihood (pseudo-values, see `robust_rows_near`): once images are near, a search
takes them anew at the beginning of every iteration, around those that it has reached. Where it stays, the likelihood of
Student's t has a maximum over images and derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.observed_rows import MatchedRows, ObservedRows
from lit_recon.attacks.updates.noise import RobustRows, robust_rows, robust_rows_near
from lit_recon.records import Noise, Update

#: The noise of rows in units of it.
UNIT = Noise("gaussian", 1.0)


@dataclass(frozen=True)
class HeavyTails:
    """Rows of several layers in units of their noise, with outliers pulled in.

    Attributes:
        judged: the rows as they were observed.
        update: that they are of.
        begun: the rows around fits of low rank, by which a search begins.
    """

    judged: MatchedRows[ObservedRows]
    update: Update
    begun: tuple[RobustRows, ...]

    @classmethod
    def of(cls, judged: MatchedRows[ObservedRows], update: Update) -> HeavyTails | None:
        """None if the tails of the noise are normal."""
        found = tuple(robust_rows(one.values, one.patches) for one in judged.rows)
        gain = sum(one.gain * one.values.numel() for one in found)
        return cls(judged, update, found) if gain > 0 else None

    @property
    def scale(self) -> float:
        """Median standard deviation of the noise of rows once outliers are pulled in."""
        return median(one.scale for one in self.begun)

    @cached_property
    def first(self) -> MatchedRows[ObservedRows]:
        """The rows by which a search begins."""
        return self._with(self.begun)

    def around(self, images: Tensor) -> MatchedRows[ObservedRows]:
        """The rows around the best fit of the patches of images `(n, c, h, w)`."""
        return self._with(self._near(images))

    def scale_around(self, images: Tensor) -> float:
        """Their `scale`."""
        return median(one.scale for one in self._near(images))

    def _near(self, images: Tensor) -> tuple[RobustRows, ...]:
        with torch.no_grad():
            patches = self.judged.patches(images)
        matrices = [self.update[f"{one.layer.name}.weight"].detach().flatten(1) for one in self.judged.rows]
        return tuple(map(robust_rows_near, matrices, patches, self.begun))

    def _with(self, found: tuple[RobustRows, ...]) -> MatchedRows[ObservedRows]:
        rows = tuple(replace(one, values=own.values) for one, own in zip(self.judged.rows, found, strict=True))
        return MatchedRows(rows, self.judged.passes)
