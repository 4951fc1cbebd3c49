"""Means and spreads over all images of a run, however they are divided among processes, from sums in float64."""

from __future__ import annotations

import math

import lit_recon._torchvision

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_recon.errors import ShapeError


def interval_of_mean(n: float, batches: float, mean: float, deviations: float) -> tuple[float, float] | None:
    """95 % confidence interval of the mean over `n` images of independent batches; images of one batch may depend.

    By Student's t with one degree of freedom less than batches; None for fewer than two batches. `deviations` is the
    sum over batches of the squared sum of their images' deviations from the mean.

    Source: Liang and Zeger 1986, the variance of a mean of clusters, with the factor B / (B - 1) of small samples.

    >>> interval_of_mean(n=2, batches=2, mean=0.5, deviations=0.125)  # 0.25 and 0.75, each a batch of its own
    (-2.676..., 3.676...)
    """
    from scipy.stats import t

    if batches < 2 or not math.isfinite(mean) or not math.isfinite(deviations):
        return None
    error = math.sqrt(batches / (batches - 1) * max(deviations, 0.0)) / n
    half = float(t.ppf(0.975, batches - 1)) * error
    return mean - half, mean + half


class ImageScore(Metric):
    """Mean, sample standard deviation and confidence interval of the mean of the score `name` over all images."""

    is_differentiable = False
    full_state_update = False
    total: Tensor
    squares: Tensor
    n: Tensor
    batches: Tensor
    batch_squares: Tensor
    batch_products: Tensor
    batch_sizes: Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        # of the batches: how many, and sums of (sum of scores)^2, of (sum of scores) n, and of n^2
        for state in ("total", "squares", "n", "batches", "batch_squares", "batch_products", "batch_sizes"):
            self.add_state(state, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Add the scores `(n,)` of one batch, perhaps none; a ShapeError for another shape or NaN."""
        if values.dim() != 1 or torch.isnan(values).any():
            raise ShapeError(
                f"score '{self.name}' needs one number per image (n,) and no NaN; got shape {tuple(values.shape)}"
            )
        exact = values.detach().to(self.total)
        total, n = exact.sum(), len(values)
        self.total += total
        self.squares += exact.square().sum()
        self.n += n
        self.batches += n > 0
        self.batch_squares += total.square()
        self.batch_products += total * n
        self.batch_sizes += n**2

    def compute(self) -> dict[str, Tensor]:
        """`mean`, `std`, ends `low` and `high` of the interval, and count `n`, over all processes; NaN for none."""
        mean = self.total / self.n
        variance = (self.squares - self.total * mean) / (self.n - 1)
        std = torch.where(self.n > 1, variance.clamp(min=0).sqrt(), torch.nan)
        deviations = self.batch_squares - 2 * mean * self.batch_products + mean.square() * self.batch_sizes
        interval = interval_of_mean(float(self.n), float(self.batches), float(mean), float(deviations))
        low, high = (mean.new_tensor(end) for end in interval or (math.nan, math.nan))
        return {"mean": mean, "std": std, "low": low, "high": high, "n": self.n}

    def record(self) -> dict[str, float | str | None]:
        """Entries of `metrics.json`: `<name>`, `<name>_std`, and with two batches or more `<name>_low`, `<name>_high`.

        A mean that does not exist or is infinite (PSNR of an exact reconstruction) is None, with `<name>_reason`.
        Every process has to call this, since it synchronizes.

        >>> score = ImageScore("rmse")
        >>> score.update(torch.tensor([0.25, 0.75]))
        >>> score.record()
        {'rmse': 0.5, 'rmse_std': 0.3535...}
        """
        computed = {key: value.item() for key, value in self.compute().items()}
        mean, std = (value if math.isfinite(value) else None for value in (computed["mean"], computed["std"]))
        entries: dict[str, float | str | None] = {self.name: mean, f"{self.name}_std": std}
        if math.isfinite(computed["low"]):
            entries |= {f"{self.name}_low": computed["low"], f"{self.name}_high": computed["high"]}
        if mean is None:
            reason = "no image was scored" if not computed["n"] else "infinite for at least one image"
            entries[f"{self.name}_reason"] = reason
        return entries
