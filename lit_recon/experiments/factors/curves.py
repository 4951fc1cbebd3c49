"""One drawing per factor: the attack's error over its values, beside what needs no attack and what the paper prints."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lit_recon.experiments.factors.results import FactorCellScores, FactorResult, FactorStudy, Line, Point
from lit_recon.reporting.plots import COLOURS, MARKS, image_grid, new_figure, svg
from lit_recon.reporting.record import read_images
from lit_recon.reporting.robustness_curves import Bounded, robustness_curves
from lit_recon.reporting.wording import format_score

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GREY = "#6b7280"
#: What needs no attack: key, words, style of its line.
_LEVELS = (("oracle_mse", "nearest other image", "--"), ("baseline_mean_image_mse", "mean image", ":"))


def factor_curve(study: FactorStudy, factor: FactorResult, kind: str = "svg") -> bytes:
    """The drawing of a factor.

    Args:
        study: with the base.
        factor: one of its factors, with at least one value that has figures.
        kind: `svg` or `png`.
    """
    figure = new_figure(6.8, 3.9)
    panel = figure.subplots()
    points = [point for _, point in factor.points]
    places = _places(factor)
    numeric = all(point.place is not None for point in points)
    _axes(panel, factor, places, numeric)
    for index, line in enumerate(factor.lines):
        _draw(panel, line, places, COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)], numeric)
    for key, words, style in _LEVELS:
        _level(panel, points, places, key, words, style)
    base = study.base.mean("mse")
    if base is not None and not any(study.is_base(point) for point in points):
        panel.axhline(base, color="black", linewidth=0.8, alpha=0.5, label="base")
    panel.set_ylim(bottom=0)
    handles, labels = panel.get_legend_handles_labels()
    if is_private(factor):
        more, words = _accuracy(panel, points, places).get_legend_handles_labels()
        handles, labels = handles + more, labels + words
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return drawn(figure, kind)


def is_private(factor: FactorResult) -> bool:
    """Whether released models of the factor were trained with differential privacy."""
    return any(point.mean("epsilon") is not None for _, point in factor.points)


def bound_curves(study: FactorStudy, factor: FactorResult) -> bytes:
    """The drawing (SVG) of the bounds on reconstruction of a factor whose models are private, over epsilon."""
    private = [(epsilon, p) for _, p in factor.points if (epsilon := p.mean("epsilon")) is not None]
    private.sort(key=lambda pair: pair[0])
    epsilons = [epsilon for epsilon, _ in private]
    curves = {
        f"kappa {kappa:g}": Bounded((epsilons, [point.bounds[index] for _, point in private]))
        for index, kappa in enumerate(study.kappas)
    }
    return robustness_curves(curves, "tight bound", linear=True)


def drawn(figure: Figure, kind: str) -> bytes:
    """The file of a drawing, the same for the same figures: `svg` or `png`."""
    if kind == "svg":
        return svg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def _places(factor: FactorResult) -> dict[str, float]:
    """Where each label lies: its number, or its position among all labels."""
    labels = {point.label: point.place for _, point in factor.points}
    if all(place is not None for place in labels.values()):
        return {label: float(place or 0.0) for label, place in labels.items()}
    return {label: float(index) for index, label in enumerate(labels)}


def _axes(panel: Any, factor: FactorResult, places: dict[str, float], numeric: bool) -> None:
    panel.set_ylabel("mean squared error")
    panel.set_xlabel(factor.axis)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    values = sorted(places.values())
    if numeric and _is_log(factor.scale, values):
        if values[0] > 0:
            panel.set_xscale("log")
        else:
            panel.set_xscale("symlog", linthresh=min(value for value in values if value > 0))
        panel.minorticks_off()
    short = {label: label if len(label) <= 16 else f"{label[:15]}…" for label in places}
    crowded = len(places) > 7 or (not numeric and sum(map(len, short.values())) > 60)
    turned = {"rotation": 25, "ha": "right", "fontsize": 8} if crowded else {"fontsize": 9}
    panel.set_xticks(list(places.values()), [short[label] for label in places], **turned)
    if not numeric:
        panel.set_xlim(-0.5, len(places) - 0.5)


def _is_log(scale: str, values: Sequence[float]) -> bool:
    if scale == "auto":
        positive = [value for value in values if value > 0]
        return values[0] >= 0 and len(positive) > 1 and positive[-1] / positive[0] >= 10
    return scale == "log" and values[-1] > 0


def _draw(panel: Any, line: Line, places: dict[str, float], colour: str, mark: str, numeric: bool) -> None:
    known = sorted(
        ((places[point.label], value, point) for point in line.points if (value := point.mean("mse")) is not None),
        key=lambda item: item[0],
    )
    if known:
        panel.errorbar(
            [place for place, _, _ in known],
            [value for _, value, _ in known],
            yerr=[point.spread for _, _, point in known],
            color=colour,
            marker=mark,
            markersize=5,
            capsize=2.5,
            linewidth=1.3 if numeric else 0,
            elinewidth=1,
            label=line.name or "attack",
        )
    printed = [(places[point.label], point.paper) for point in line.points if isinstance(point.paper, int | float)]
    if printed:
        style = {"marker": "x", "color": _GREY, "markersize": 7, "markeredgewidth": 1.6, "linestyle": ""}
        panel.plot([place for place, _ in printed], [value for _, value in printed], label="paper", **style)


def _accuracy(panel: Any, points: Sequence[Point], places: dict[str, float]) -> Any:
    """Accuracy of the released models on an axis of its own."""
    right = panel.twinx()
    found = sorted((places[p.label], value) for p in points if (value := p.mean("accuracy")) is not None)
    style = {"color": COLOURS[2], "marker": "s", "markersize": 4, "linewidth": 1}
    right.plot([place for place, _ in found], [value for _, value in found], label="accuracy (right)", **style)
    right.set_ylim(0, 1)
    right.set_ylabel("accuracy of released models")
    right.spines[["top"]].set_visible(False)
    return right


def _level(panel: Any, points: Sequence[Point], places: dict[str, float], key: str, words: str, style: str) -> None:
    found = sorted({places[p.label]: value for p in points if (value := p.mean(key)) is not None}.items())
    if not found:
        return
    values = [value for _, value in found]
    if math.isclose(min(values), max(values), rel_tol=1e-9):
        panel.axhline(values[0], color=_GREY, linewidth=1.1, linestyle=style, label=words)
    else:
        panel.plot([place for place, _ in found], values, color=_GREY, linewidth=1.1, linestyle=style, label=words)


#: Targets side by side, and easy or hard ones.
_IMAGES, _EXTREME = 12, 6

_Images = NDArray[np.float32]


def factor_galleries(factor: FactorResult) -> list[bytes]:
    """A PNG per shape of images: targets, then a row per value; the targets again where a value has others."""
    shapes: dict[tuple[int, ...], dict[str, _Images]] = {}
    last: dict[tuple[int, ...], _Images] = {}
    for words, point in factor.points:
        if not point.known:
            continue
        cell = point.known[0]
        images = read_images(cell.folder.reconstructions)
        targets = images.targets[:_IMAGES]
        key = targets.shape
        rows = shapes.setdefault(key, {})
        if key not in last or not np.array_equal(last[key], targets):
            rows["target" if key not in last else f"target, {words}"] = targets
            last[key] = targets
        rows[f"{words}: {format_score('mse', cell.number('mse'))}"] = images.reconstructions[:_IMAGES]
    return [image_grid(rows, columns=_IMAGES) for rows in shapes.values()]


def extremes(cells: Sequence[FactorCellScores]) -> bytes | None:
    """Targets with the smallest and with the largest errors of the first run that has figures; None without one."""
    cell = next((cell for cell in cells if not cell.reason), None)
    if cell is None:
        return None
    images, order = read_images(cell.folder.reconstructions), np.argsort(cell.errors)
    chosen = np.concatenate([order[:_EXTREME], order[_EXTREME:][-_EXTREME:]])
    rows = {"target": images.targets[chosen], "reconstruction": images.reconstructions[chosen]}
    return image_grid(rows, columns=2 * _EXTREME)
