"""Scores of a whole run: mean and spread over all images, the same on every process however the images were shared out.

States are a few float64 sums, whatever the number of images. Devices without float64 (Apple's MPS) cannot hold them.
"""

from __future__ import annotations

import math

import lit_recon._torchvision

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_recon.errors import ShapeError
from lit_recon.metrics.labels import label_overlap


def mean_and_std(total: Tensor, squares: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sample standard deviation (divisor n - 1) from the sum, the sum of squares and the count.

    NaN where a figure does not exist: the mean of none, the spread of fewer than two or of infinite scores.
    """
    mean = total / n
    variance = (squares - total * mean) / (n - 1)
    return mean, torch.where(n > 1, variance.clamp(min=0).sqrt(), torch.nan)


class ImageScore(Metric):
    """Mean and sample standard deviation of one score over all images.

    Args:
        name: the score's key in the run's record, such as `rmse` or `baseline_mean_image_rmse`.
    """

    is_differentiable = False
    full_state_update = False
    total: Tensor
    squares: Tensor
    n: Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        for state in ("total", "squares", "n"):
            self.add_state(state, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Add the scores `(n,)` of some images; none is fine, for a process that was left without work.

        Raises:
            ShapeError: if the values are not one number per image, or one is NaN.
        """
        if values.dim() != 1 or torch.isnan(values).any():
            raise ShapeError(
                f"score '{self.name}' needs one number per image (n,) and no NaN; got shape {tuple(values.shape)}"
            )
        exact = values.detach().to(self.total)
        self.total += exact.sum()
        self.squares += exact.square().sum()
        self.n += len(values)

    def compute(self) -> dict[str, Tensor]:
        """Over all processes: `mean` and `std` (NaN where they do not exist) and the number of images `n`."""
        mean, std = mean_and_std(self.total, self.squares, self.n)
        return {"mean": mean, "std": std, "n": self.n}

    def record(self) -> dict[str, float | str | None]:
        """The entries of the run's record: `<name>`, `<name>_std`, and `<name>_reason` where there is no mean.

        JSON knows no infinity: an infinite mean (PSNR of an image that was met exactly) is given as None with the
        reason. Every process has to call this, since it synchronises.

        >>> score = ImageScore("rmse")
        >>> score.update(torch.tensor([0.25, 0.75]))
        >>> score.record()
        {'rmse': 0.5, 'rmse_std': 0.3535...}
        """
        computed = {key: value.item() for key, value in self.compute().items()}
        mean, std = (computed[key] if math.isfinite(computed[key]) else None for key in ("mean", "std"))
        entries: dict[str, float | str | None] = {self.name: mean, f"{self.name}_std": std}
        if mean is None:
            reason = "no image was scored" if not computed["n"] else "infinite for at least one image"
            entries[f"{self.name}_reason"] = reason
        return entries


class LabelAccuracy(Metric):
    """Share of all labels that were recovered, batch by batch as multisets; NaN before the first label."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    overlap: Tensor
    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        for state in ("overlap", "n"):
            self.add_state(state, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, recovered: Tensor, true: Tensor) -> None:
        """Add the labels `(n,)` of one batch, see `label_overlap`.

        Raises:
            ShapeError: if the two are not label vectors of equal length.
        """
        self.overlap += label_overlap(recovered, true)
        self.n += len(true)

    def compute(self) -> Tensor:
        """Share in [0, 1] over all processes."""
        return self.overlap / self.n
