"""The rows of a run's tables: one attacked image, one loss curve, one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: A figure or a fact of `metrics.json`; None when it could not be had, with the reason under `<key>_reason`.
Metric = str | float | int | bool | None | list[str]


@dataclass(frozen=True)
class VictimRow:
    """One attacked image.

    Attributes:
        batch: number of the client batch that the image was in, from 0.
        id: index of the image in its data set.
        label, recovered_label: true class, and the class that the attack recovered or was given.
        loss: attacker-visible loss of the batch's reconstruction.
        scores: `mse`, `rmse`, `psnr`, `ssim`, `lpips`, `mean_image_rmse`, `nearest_public_rmse`, ...; None where a
            score could not be had.
    """

    batch: int
    id: int
    label: int
    recovered_label: int
    loss: float
    scores: Mapping[str, float | None]


@dataclass(frozen=True)
class LossCurve:
    """The losses of one restart on one batch: equally long lists by name, `step` and `loss` among them."""

    batch: int
    restart: int
    values: Mapping[str, Sequence[float]]
