"""The loss curves of a run as scalable lines: a page stretches them to its width and keeps its text readable.

Positions are fractions of the drawing area: 0 left or bottom, 1 right or top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_recon.reporting.writing import LossCurve

#: Size of the drawing area in units of its own; the page stretches it.
WIDTH, HEIGHT = 1000, 400

_POINTS = 200  # per line; more cannot be seen
_POINTS_IN_ALL = 20_000  # many lines hide each other's detail, and the page should stay small
_POINTS_AT_LEAST = 40
_LOG_SPAN = 10.0  # ratio of largest to smallest loss from which a logarithmic axis shows more


class Tick(NamedTuple):
    """A labelled position on an axis."""

    position: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Lines to draw, SVG path data each, with the ticks of both axes."""

    lines: list[str]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    logarithmic: bool

    @property
    def opacity(self) -> float:
        """Of each line: fainter the more there are, so that a bundle shows where most of them run."""
        return round(min(0.9, max(0.12, 4 / (len(self.lines) + 3))), 2)


def loss_chart(curves: Sequence[LossCurve]) -> Chart | None:
    """One line per curve, loss over step; logarithmic where all losses are positive and span a decade.

    None when no curve has two finite points.
    """
    points = [_finite_points(curve) for curve in curves]
    points = [line for line in points if len(line) > 1]
    if not points:
        return None
    steps, losses = np.concatenate(points).T
    low, high = float(losses.min()), float(losses.max())
    logarithmic = low > 0 and high / low >= _LOG_SPAN
    x_axis, y_axis = (float(steps.min()), float(steps.max())), (low, high)
    y_values = _log_values(*y_axis) if logarithmic else _round_values(*y_axis)
    n_points = max(_POINTS_AT_LEAST, min(_POINTS, _POINTS_IN_ALL // len(points)))
    return Chart(
        [_path(line[_spread(len(line), n_points)], x_axis, y_axis, logarithmic) for line in points],
        [Tick(_place(x, *x_axis), f"{x:,.6g}") for x in _round_values(*x_axis)],
        [Tick(_place(y, *y_axis, logarithmic), f"{y:.6g}") for y in y_values],
        logarithmic,
    )


def _path(
    points: NDArray[np.float64], x_axis: tuple[float, float], y_axis: tuple[float, float], logarithmic: bool
) -> str:
    places = (
        f"{WIDTH * _place(x, *x_axis):.0f} {HEIGHT * (1 - _place(y, *y_axis, logarithmic)):.1f}" for x, y in points
    )
    return f"M{'L'.join(places)}"


def _spread(n: int, chosen: int) -> NDArray[np.int64]:
    """At most `chosen` indices below `n`, evenly spread, first and last among them."""
    return np.unique(np.linspace(0, n - 1, min(n, chosen)).round().astype(np.int64))


def _finite_points(curve: LossCurve) -> NDArray[np.float64]:
    points = np.column_stack((curve.values["step"], curve.values["loss"])).astype(np.float64)
    finite: NDArray[np.float64] = points[np.isfinite(points).all(axis=1)]
    return finite


def _place(value: float, low: float, high: float, logarithmic: bool = False) -> float:
    if logarithmic:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low) if high > low else 0.5


def _round_values(low: float, high: float, about: int = 4) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within `low` to `high`, some `about` of them."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_values(low: float, high: float, at_most: int = 6) -> list[float]:
    """Powers of ten within `low` to `high`: not all where there are many, with 2 and 5 times them where few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    stride = math.ceil((last - first) / at_most)
    values = [factor * 10.0**exponent for exponent in range(last, first - 1, -stride) for factor in factors]
    return sorted(value for value in values if low <= value <= high)
