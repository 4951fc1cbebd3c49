"""Means over all images of a run, their spreads and errors, however they are divided among processes, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import lit_recon._torchvision

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_recon.errors import ShapeError


def error_of_mean(n: float, batches: float, deviations: float) -> float | None:
    """Standard error of a mean over `n` images of independent batches; images of one batch may depend.

    None for fewer than two batches, which say nothing about it. `deviations` is the sum over batches of the squared sum
    of their images' deviations from the mean.

    Source: Liang and Zeger 1986, the variance of a mean of clusters, with the factor B / (B - 1) of small samples.

    >>> error_of_mean(n=2, batches=2, deviations=0.125)  # 0.25 and 0.75, each a batch of its own
    0.25
    """
    if batches < 2 or not math.isfinite(deviations):
        return None
    return math.sqrt(batches / (batches - 1) * max(deviations, 0.0)) / n


def _quantile(batches: float) -> float:
    """Errors of a mean on each side of it that hold the true mean with a chance of 95 %."""
    from scipy.stats import t

    return float(t.ppf(0.975, batches - 1))


def interval_of_mean(n: float, batches: float, mean: float, deviations: float) -> tuple[float, float] | None:
    """95 % confidence interval of a mean with the error of `error_of_mean`; None where that is not known.

    By Student's t with one degree of freedom less than batches.

    >>> interval_of_mean(n=2, batches=2, mean=0.5, deviations=0.125)
    (-2.676..., 3.676...)
    """
    error = error_of_mean(n, batches, deviations)
    if error is None or not math.isfinite(mean):
        return None
    half = _quantile(batches) * error
    return mean - half, mean + half


def recorded_error(record: Mapping[str, object], key: str) -> float | None:
    """`error_of_mean` of the metric `key` in a run's record; None for a single batch, or where its interval is missing.

    Where every image is a batch of its own, as for released models, the standard deviation says the same.

    >>> record = {"n": 2, "n_batches": 2, "rmse": 0.5, "rmse_std": 0.125**0.5}
    >>> round(recorded_error(record, "rmse"), 12), recorded_error({**record, "n_batches": 1}, "rmse")
    (0.25, None)
    """

    def number(name: str) -> float:
        value = record.get(name)
        return float(value) if isinstance(value, int | float) else math.nan

    n, batches, std = (number(name) for name in ("n", "n_batches", f"{key}_std"))
    width = number(f"{key}_high") - number(f"{key}_low")
    if batches >= 2 and math.isfinite(width):
        return width / 2 / _quantile(batches)
    return error_of_mean(n, batches, (n - 1) * std**2) if n == batches else None


#: Reasons in a record why it has no mean, by the infinite mean.
_INFINITE = {math.inf: "infinite for at least one image", -math.inf: "negative infinite for at least one image"}


def recorded_mean(record: Mapping[str, object], key: str) -> float | None:
    """The mean of the metric `key` in a run's record; infinite where the record says so; None where there is none.

    >>> recorded_mean({"psnr": None, "psnr_reason": "infinite for at least one image"}, "psnr")
    inf
    """
    value = record.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return next((mean for mean, reason in _INFINITE.items() if record.get(f"{key}_reason") == reason), None)


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
            both = "infinite for some images, negative infinite for others"
            reason = _INFINITE.get(computed["mean"], both) if computed["n"] else "no image was scored"
            entries[f"{self.name}_reason"] = reason
        return entries
