"""Plots as SVG or PNG, and a loss chart for pages."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_recon.reporting.writing import LossCurve

#: Colours that stay apart for the colour-blind (Okabe and Ito), and markers that differ in grey print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b6470", "#8c6d1f")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY = "#6b7280"
LineStyle = str | tuple[int, tuple[float, ...]]
STYLES: tuple[LineStyle, ...] = (":", "--", "-.", (0, (6, 1.5, 1, 1.5, 1, 1.5)))

_BINS = 40
_FEW_VALUES = 5  # samples with fewer distinct values are drawn as lines instead of a histogram
_LEGEND_ENTRIES = 24
_AUTOMATIC = (None, None)


@dataclass(frozen=True)
class Series:
    """Points of a plot, with matplotlib's line style and marker; empty attributes are left out."""

    name: str  # in the legend
    x: Sequence[float]
    y: Sequence[float]
    line: LineStyle = "-"
    marker: str = ""
    colour: str = GREY
    width: float = 1.3  # of the line, in points
    errors: Sequence[float] | tuple[Sequence[float], Sequence[float]] = ()  # half lengths of bars, or (below, above)
    labels: Sequence[str] = ()  # text beside each point
    right: bool = False  # use the axis on the right
    x_errors: Sequence[float] = ()  # half lengths of horizontal bars


@dataclass(frozen=True)
class Plot:
    """One pair of axes: curves and points, or the histogram (or box plot) of samples."""

    title: str = ""
    x_label: str = ""
    y_label: str = ""
    right_label: str = ""
    series: Sequence[Series] = ()
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by name, drawn as histograms of shares
    boxes: bool = False  # box plots instead
    levels: Mapping[str, float] = field(default_factory=dict)  # grey lines: vertical in a histogram, else horizontal
    x_scale: str = "linear"  # or `log` or `symlog`
    y_scale: str = "linear"
    x_range: tuple[float, float] | None = None
    y_range: tuple[float | None, float | None] = _AUTOMATIC
    x_ticks: Mapping[str, float] | None = None  # position by label
    y_ticks: Mapping[str, float] | None = None
    message: str = ""  # shown where there is nothing to draw


def draw(
    plots: Sequence[Plot],
    columns: int = 3,
    size: tuple[float, float] = (6.8, 3.9),
    kind: str = "svg",
    shared_y: bool = False,
) -> bytes:
    """Plots of a size in inches, at most `columns` side by side, with one legend below, as `svg` or `png`.

    With `shared_y` all have the same y axis, labelled once per row. Equal input gives equal bytes.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    columns = min(columns, len(plots))
    rows = math.ceil(len(plots) / columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=shared_y).ravel()
    entries: dict[str, Any] = {}
    for index, (panel, plot) in enumerate(zip(panels, plots, strict=False)):
        for axes in _draw(panel, plot, y_label=not shared_y or index % columns == 0):
            handles, labels = axes.get_legend_handles_labels()
            entries = dict(zip(labels, handles, strict=True)) | entries
    for panel in panels[len(plots) :]:
        panel.set_visible(False)
    if entries and len(entries) <= _LEGEND_ENTRIES:
        style = {"ncols": max(2, round(size[0] * columns / 2.4)), "frameon": False, "fontsize": 8}
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", **style)
    buffer = io.BytesIO()
    options: dict[str, Any] = {"metadata": {"Date": None}}
    if kind == "png":
        options = {"metadata": {"Software": None}, "dpi": 150}
    with mpl.rc_context({"svg.hashsalt": "lit_recon"}):
        figure.savefig(buffer, format=kind, **options)
    return buffer.getvalue()


def _draw(panel: Any, plot: Plot, y_label: bool) -> list[Any]:
    """Draw one plot; returns its axes, the right one last."""
    panel.set_title(plot.title, fontsize=10)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    # The linear part of a symmetric logarithmic axis ends at the smallest positive tick.
    positive = [place for place in (plot.x_ticks or {}).values() if place > 0]
    panel.set_xscale(plot.x_scale, **({"linthresh": min(positive)} if plot.x_scale == "symlog" and positive else {}))
    panel.set_yscale(plot.y_scale)
    panel.set_xlabel(plot.x_label, fontsize=9)
    panel.set_ylabel(plot.y_label if y_label else "", fontsize=9)
    if not plot.series and not plot.samples:
        panel.text(0.5, 0.5, plot.message, ha="center", va="center", transform=panel.transAxes)
        return [panel]
    if plot.x_ticks is not None:
        short = [label if len(label) <= 16 else f"{label[:15]}…" for label in plot.x_ticks]
        crowded = len(short) > 7 or sum(map(len, short)) > 60
        turned = {"rotation": 25, "ha": "right", "fontsize": 8} if crowded else {"fontsize": 9}
        panel.set_xticks(list(plot.x_ticks.values()), short, **turned)
        panel.set_xticks([], minor=True)
    if plot.y_ticks is not None:
        panel.set_yticks(list(plot.y_ticks.values()), list(plot.y_ticks))
    if plot.x_range is not None:
        panel.set_xlim(*plot.x_range)
    axes = [panel]
    if plot.right_label:
        axes.append(panel.twinx())
        axes[1].set_ylabel(plot.right_label, fontsize=9)
        axes[1].spines[["top"]].set_visible(False)
        axes[1].set_ylim(0, 1)
    if plot.boxes:
        panel.boxplot(list(plot.samples.values()), tick_labels=list(plot.samples), flierprops={"ms": 3})
    elif plot.samples:
        _histograms(panel, plot)
    for series in plot.series:
        _points(axes[-1 if series.right else 0], series)
    line = panel.axvline if plot.samples and not plot.boxes else panel.axhline
    for index, (name, value) in enumerate(plot.levels.items()):
        line(value, label=name, color=GREY, linewidth=1.1, linestyle=STYLES[index % len(STYLES)], zorder=0)
    if plot.y_range != _AUTOMATIC:
        panel.set_ylim(*plot.y_range)
    return axes


def _points(panel: Any, series: Series) -> None:
    style: dict[str, Any] = {"color": series.colour, "linestyle": series.line, "linewidth": series.width}
    style |= {"marker": series.marker, "markersize": 5, "label": series.name or None}
    if not series.line:
        style["markerfacecolor"] = "none"  # so that points that coincide are all seen
    if not len(series.errors) and not len(series.x_errors):
        panel.plot(series.x, series.y, **style)
    else:
        bars = {"yerr": series.errors, "xerr": series.x_errors}
        known = {name: lengths for name, lengths in bars.items() if len(lengths)}
        panel.errorbar(series.x, series.y, **known, capsize=2.5, elinewidth=1, **style)
    for label, x, y in zip(series.labels, series.x, series.y, strict=False):
        place = {"textcoords": "offset points", "xytext": (5, 4), "fontsize": 7}
        panel.annotate(label, (x, y), color=series.colour, **place)


def _histograms(panel: Any, plot: Plot) -> None:
    """Shares per bin, the bins common to all samples; few distinct values are vertical lines."""
    known = np.concatenate([*map(np.asarray, plot.samples.values()), [*plot.levels.values()]])
    edges = np.histogram_bin_edges(known, bins=_BINS)
    for index, (name, values) in enumerate(plot.samples.items()):
        colour = COLOURS[index % len(COLOURS)]
        if len(distinct := set(values)) < _FEW_VALUES:
            for number, value in enumerate(sorted(distinct)):
                panel.axvline(value, color=colour, linewidth=2, label=None if number else name)
            continue
        style = {"histtype": "stepfilled", "alpha": 0.7} if not index else {"histtype": "step", "linewidth": 1.4}
        panel.hist(values, bins=edges, weights=[1 / len(values)] * len(values), color=colour, label=name, **style)


#: View box of the loss chart, which the page stretches to its width.
WIDTH, HEIGHT = 1000, 400
_POINTS = 200  # per line; more cannot be seen
_POINTS_IN_ALL = 20_000  # keeps the page small
_POINTS_AT_LEAST = 40
_LOG_SPAN = 10.0  # ratio of largest to smallest loss from which a logarithmic axis shows more


class Tick(NamedTuple):
    """A labelled position on an axis: 0 is left or bottom, 1 right or top."""

    position: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Loss curves as SVG path data, with the ticks of both axes."""

    lines: list[str]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    logarithmic: bool

    @property
    def opacity(self) -> float:
        """Of each line; many lines are fainter, so that dense regions stand out."""
        return round(min(0.9, max(0.12, 4 / (len(self.lines) + 3))), 2)


def loss_chart(curves: Sequence[LossCurve]) -> Chart | None:
    """One line per curve of two or more finite points, loss over step; None without any."""
    points = [line for curve in curves if len(line := _finite_points(curve)) > 1]
    if not points:
        return None
    steps, losses = np.concatenate(points).T
    low, high = float(losses.min()), float(losses.max())
    logarithmic = low > 0 and high / low >= _LOG_SPAN
    x_axis, y_axis = (float(steps.min()), float(steps.max())), (low, high)
    y_values = _log_values(*y_axis) if logarithmic else _round_values(*y_axis)
    n_points = max(_POINTS_AT_LEAST, min(_POINTS, _POINTS_IN_ALL // len(points)))
    return Chart(
        [_path(_thinned(line, n_points), x_axis, y_axis, logarithmic) for line in points],
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


def _thinned(points: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """At most `n` of the points, evenly spread, first and last among them."""
    return points[np.unique(np.linspace(0, len(points) - 1, min(len(points), n)).round().astype(np.int64))]


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
