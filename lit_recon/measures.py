"""Names and formats of metrics, without PyTorch, so that pages can be built without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """Name and format of a metric, stored with a run's values.

    Args:
        key: in `metrics.json` and `victims.csv`, such as `rmse`.
        name: in tables and on cards.
        higher_is_better: None where neither direction is.
        decimals: digits after the point.
        unit: printed after the number; with `%`, numbers are fractions and are printed times 100.
        low, high: least and largest possible value, where printed intervals end; None without a limit.
    """

    key: str
    name: str
    higher_is_better: bool | None = None
    decimals: int = 3
    unit: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def better(self) -> str:
        """An arrow towards better values; empty where there is no direction."""
        return "" if self.higher_is_better is None else "↑" if self.higher_is_better else "↓"


#: The package's own metrics.
MEASURES = {
    measure.key: measure
    for measure in (
        Measure("mse", "MSE", higher_is_better=False, decimals=4, low=0.0),
        Measure("rmse", "RMSE", higher_is_better=False, low=0.0),
        Measure("psnr", "PSNR", higher_is_better=True, decimals=1, unit="dB"),
        Measure("ssim", "SSIM", higher_is_better=True, low=-1.0, high=1.0),
        Measure("lpips", "LPIPS", higher_is_better=False, low=0.0),
        Measure("kl", "KL divergence", higher_is_better=False, low=0.0),
        Measure("label_accuracy", "Labels right", higher_is_better=True, decimals=0, unit="%", low=0.0, high=1.0),
        Measure("feature_error", "Feature error", higher_is_better=False, low=0.0, high=1.0),
        Measure("feature_cosine", "Feature |cos|", higher_is_better=True, low=0.0, high=1.0),
    )
}
