"""Figures as text, with the decimals that mean something."""

from __future__ import annotations

import math
from dataclasses import dataclass

MISSING = "n/a"
#: There is no such figure or setting, as opposed to one that could not be had.
ABSENT = "\N{EN DASH}"


@dataclass(frozen=True)
class Measure:
    """How a metric is called and read; `better` points where good values lie."""

    key: str
    name: str
    better: str = ""
    decimals: int = 3
    unit: str = ""


_MEASURES = (
    Measure("rmse", "RMSE", "↓"),
    Measure("psnr", "PSNR", "↑", decimals=1, unit="dB"),
    Measure("ssim", "SSIM", "↑"),
    Measure("lpips", "LPIPS", "↓"),
    Measure("mse", "MSE", "↓", decimals=4),
    Measure("label_accuracy", "Labels right", "↑", decimals=0, unit="%"),
    Measure("feature_error", "Feature error", "↓"),
    Measure("feature_cosine", "Feature |cos|", "↑"),
)


def measure_of(key: str) -> Measure:
    """The metric under `key`, a plain one for a key that is not among the usual."""
    usual = next((measure for measure in _MEASURES if measure.key == key), None)
    return usual or Measure(key, key.replace("_", " ").capitalize())


def format_score(key: str, value: float | None, unit: bool = True) -> str:
    r"""A metric's value, with more decimals where it would round to nearly nothing.

    >>> format_score("rmse", 0.05149), format_score("rmse", 0.00213), format_score("psnr", 25.77)
    ('0.051', '0.0021', '25.8\xa0dB')
    """
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "∞" if value == math.inf else str(value)
    measure = measure_of(key)
    shown = 100 * value if measure.unit == "%" else value
    text = f"{shown:.{measure.decimals}f}"
    if shown and abs(shown) < 10 ** (1 - measure.decimals):
        text = f"{shown:.2g}"
    return f"{text}\N{NO-BREAK SPACE}{measure.unit}" if unit and measure.unit else text


def format_printed(key: str, value: object) -> str:
    """A paper's figure with the digits that the paper prints, or the text that stands for it.

    >>> format_printed("rmse", 0.16), format_printed("rmse", "0.16 to 0.25"), format_printed("rmse", None)
    ('0.16', '0.16 to 0.25', '–')
    """
    if value is None:
        return ABSENT
    if not isinstance(value, int | float):
        return str(value)
    unit = measure_of(key).unit
    if unit == "%":
        return format_score(key, value)
    return f"{value:g}\N{NO-BREAK SPACE}{unit}" if unit else f"{value:g}"


def duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> duration(0.0123), duration(4.2), duration(42.4), duration(125), duration(7380)
    ('12.3 ms', '4.2 s', '42 s', '2 min 5 s', '2 h 3 min')
    """
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
