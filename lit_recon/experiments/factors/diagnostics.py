"""Plots and image grids of a factor: its error curve, and diagnostics such as gradients, embeddings and seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, combinations
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_recon.experiments.factors.results import FactorCellScores, FactorResult, FactorStudy, Point
from lit_recon.experiments.released_attack.page import error_histogram
from lit_recon.reporting.images import image_grid
from lit_recon.reporting.pages import Panel, Picture
from lit_recon.reporting.plots import COLOURS, MARKS, STYLES, Plot, Series, draw
from lit_recon.reporting.record import read_images
from lit_recon.reporting.wording import ABSENT, format_score, percent, short

#: Reference errors that need no attack: key, words, and line style where they differ between values.
_LEVELS = (("oracle_mse", "nearest other image", STYLES[2]), ("baseline_mean_image_mse", "mean image", STYLES[3]))
#: Target images whose errors are followed over all seeds, and plots of one kind at most.
_FOLLOWED, _MOST = 10, 6
#: Target images side by side, and easy or hard ones.
_IMAGES, _EXTREME = 12, 6
#: Size of small plots, in inches, and classes up to which the legend names them.
_SMALL, _NAMED_CLASSES = (3.3, 2.9), 10


def factor_curve(study: FactorStudy, factor: FactorResult, kind: str = "svg") -> bytes:
    """The attack's error over the values of a factor, one of which must have an error, with the paper's values."""
    points = [point for _, point in factor.points]
    numeric = all(point.place is not None for point in points)
    labels = {point.label: point.place for point in points}
    places = {
        label: float(index if place is None or not numeric else place)
        for index, (label, place) in enumerate(labels.items())
    }
    lines = [_line(line.name, line.points, places, index, numeric) for index, line in enumerate(factor.lines)]
    series, levels = list(chain.from_iterable(lines)), dict[str, float]()
    for key, words, style in _LEVELS:
        xs, ys = _means(points, places, key)
        if ys and math.isclose(min(ys), max(ys), rel_tol=1e-9):
            levels[words] = ys[0]
        elif ys:
            series.append(Series(words, xs, ys, style))
    base = study.base.mean("mse")
    if base is not None and not any(study.is_base(point) for point in points):
        levels["base"] = base
    if is_private(factor):
        xs, ys = _means(points, places, "accuracy")
        series.append(Series("accuracy (right)", xs, ys, "-", "s", COLOURS[2], 1, right=True))
    plot = Plot(
        x_label=factor.axis,
        y_label="mean squared error",
        right_label="accuracy of released models" if is_private(factor) else "",
        series=series,
        levels=levels,
        x_scale=_scale(factor.scale, sorted(places.values())) if numeric else "linear",
        x_range=None if numeric else (-0.5, len(places) - 0.5),
        y_range=(0, None),
        x_ticks=places,
    )
    return draw([plot], kind=kind)


def is_private(factor: FactorResult) -> bool:
    """Whether released models of the factor were trained with differential privacy."""
    return any(point.mean("epsilon") is not None for _, point in factor.points)


def bound_curves(study: FactorStudy, factor: FactorResult) -> bytes:
    """Bounds on reconstruction over epsilon (SVG) for a factor with private models."""
    private = [(epsilon, p) for _, p in factor.points if (epsilon := p.mean("epsilon")) is not None]
    private.sort(key=lambda pair: pair[0])
    epsilons = [epsilon for epsilon, _ in private]
    bounds = zip(study.kappas, zip(*(point.bounds for _, point in private), strict=True), strict=True)
    series = [
        Series(f"tight bound, kappa {kappa:g}", epsilons, own, "-", "o", COLOURS[index % len(COLOURS)])
        for index, (kappa, own) in enumerate(bounds)
    ]
    plot = Plot(x_label="epsilon", y_label="chance of success", series=series, x_scale="log", y_range=(-0.03, 1.05))
    return draw([plot], size=(6.6, 3.9))


def _scale(scale: str, values: Sequence[float]) -> str:
    positive = [value for value in values if value > 0]
    if scale == "auto":
        logarithmic = values[0] >= 0 and len(positive) > 1 and positive[-1] / positive[0] >= 10
    else:
        logarithmic = scale == "log" and bool(positive)
    return "linear" if not logarithmic else "log" if values[0] > 0 else "symlog"


def _line(name: str, points: Sequence[Point], places: dict[str, float], index: int, joined: bool) -> list[Series]:
    """The attack's errors, and the errors that the paper prints."""
    known = [(places[p.label], value, p.spread) for p in points if (value := p.mean("mse")) is not None]
    known.sort(key=lambda item: item[0])
    printed = {places[point.label]: point.paper for point in points if isinstance(point.paper, int | float)}
    found = []
    if known:
        xs, ys, spreads = zip(*known, strict=True)
        errors = [math.nan if spread is None else spread for spread in spreads]
        style = "-" if joined else ""
        found.append(Series(name or "attack", xs, ys, style, MARKS[index % 8], COLOURS[index % 8], errors=errors))
    if printed:
        found.append(Series("paper", list(printed), list(printed.values()), "", "x"))
    return found


def _means(points: Sequence[Point], places: dict[str, float], key: str) -> tuple[list[float], list[float]]:
    """Places and means of the values that have the metric, by place."""
    found = {places[p.label]: value for p in points if (value := p.mean(key)) is not None}
    return sorted(found), [found[place] for place in sorted(found)]


def factor_galleries(factor: FactorResult) -> list[bytes]:
    """A PNG per shape of images: targets, then a row per value; the targets again where a value has others."""
    shapes: dict[tuple[int, ...], dict[str, NDArray[np.float32]]] = {}
    last: dict[tuple[int, ...], NDArray[np.float32]] = {}
    for words, cell in _finished(factor):
        images = read_images(cell.folder.reconstructions)
        targets = images.targets[:_IMAGES]
        key = targets.shape
        rows = shapes.setdefault(key, {})
        if key not in last or not np.array_equal(last[key], targets):
            rows["target" if key not in last else f"target, {words}"] = targets
            last[key] = targets
        rows[f"{words}: {format_score('mse', cell.number('mse'))}"] = images.reconstructions[:_IMAGES]
    return [image_grid(rows, columns=_IMAGES) for rows in shapes.values()]


def extremes(cell: FactorCellScores) -> bytes:
    """Target images with the smallest and with the largest errors of a finished run."""
    images, order = read_images(cell.folder.reconstructions), np.argsort(cell.errors)
    chosen = np.concatenate([order[:_EXTREME], order[_EXTREME:][-_EXTREME:]])
    rows = {"target": images.targets[chosen], "reconstruction": images.reconstructions[chosen]}
    return image_grid(rows, columns=2 * _EXTREME)


def measured_panels(factor: FactorResult) -> list[Panel]:
    """The panels of a factor's cases and measures; nothing for values without results."""
    panels = []
    named = _finished(factor)
    if not factor.setting and 2 <= len(named) <= _MOST:
        panels.append(_errors(factor, named))
    if "gradients" in factor.measures and (measured := _measured(named, "gradients")):
        panels.append(_gradients(factor, measured))
    if "embedding" in factor.measures and (measured := _measured(named, "embedding")):
        panels.append(_embedding(factor, measured))
    if factor.setting == "seed" and len(named) > 1:
        panels.append(_seeds(factor, named))
    return panels


def _finished(factor: FactorResult) -> list[tuple[str, FactorCellScores]]:
    """The first finished run of every value, with the value in words."""
    return [(words, point.known[0]) for words, point in factor.points if point.known]


def _measured(
    named: Sequence[tuple[str, FactorCellScores]], kind: str
) -> list[tuple[str, FactorCellScores, dict[str, Any]]]:
    """The runs with such a measure, and its content."""
    return [(words, cell, content) for words, cell in named if (content := cell.measure(kind)) is not None]


def _oracle(cell: FactorCellScores) -> dict[str, float]:
    """The reference line of plots of single images' errors."""
    oracle = cell.number("oracle_mse")
    return {} if oracle is None else {"nearest other image, mean": oracle}


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; NaN where one of the two is constant.

    >>> rank_correlation([1, 2, 3, 4], [1, 4, 9, 20])
    1.0
    """
    from scipy.stats import spearmanr

    if len(set(a)) < 2 or len(set(b)) < 2:
        return math.nan
    return float(spearmanr(a, b).statistic)


def correlation_in_words(value: float) -> str:
    """A rank correlation; a dash where there is none."""
    return f"{value:+.2f}" if math.isfinite(value) else ABSENT


def _errors(factor: FactorResult, named: Sequence[tuple[str, FactorCellScores]]) -> Panel:
    drawn = error_histogram({words: cell.errors for words, cell in named}, _oracle(named[0][1]))
    description = "Histograms of the squared error over all target images"
    return Panel(
        f"{factor.title}: error by target image",
        "Distribution of the attack's squared error over the target images, in each case.",
        [Picture(drawn, description, f"{factor.name}_errors.svg")],
    )


def _gradients(factor: FactorResult, named: Sequence[tuple[str, FactorCellScores, dict[str, Any]]]) -> Panel:
    rows, plots = [], []
    for words, cell, content in named:
        norms = [fmean(column) for column in zip(*content["norms"], strict=True)]
        errors = cell.errors[: len(norms)]
        told = correlation_in_words(rank_correlation(norms, errors))
        zeros = [fmean(shares) for name, shares in content["zeros"].items() if name.endswith("weight")]
        numbers = [format_score("mse", fmean(errors)), short(fmean(norms))]
        rows.append([words, *numbers, told, ", ".join(map(percent, zeros))])
        points = Series("", norms, errors, "", "o", COLOURS[0])
        plots.append(Plot(words, x_label="gradient norm", y_label="squared error", series=[points]))
    scatter = draw(plots[:_MOST], size=_SMALL)
    return Panel(
        f"{factor.title}: gradients of the unknown image",
        "The gradient of the unknown image's loss with respect to all weights, at some steps of training: its norm, "
        "averaged over these steps, against the attack's error on that image; and the share of its coordinates that "
        "are exactly zero and so carry no information about the image.",
        [
            Picture(scatter, "Squared error of every target over its gradient norm", f"{factor.name}_gradients.svg"),
            Picture(_zeros(named), "Share of zero coordinates", f"{factor.name}_zeros.svg"),
        ],
        header=["", "MSE", "Mean norm", "Rank correlation with the error", "Zero coordinates, by layer"],
        rows=rows,
        note="Weights of the first layer have no gradient where the image is black: compare the values of the factor "
        "with each other, not with zero.",
    )


def _zeros(named: Sequence[tuple[str, FactorCellScores, dict[str, Any]]]) -> bytes:
    """Shares of zero coordinates in the gradient of every layer's weights, over training steps."""
    layers = [name for name in named[0][2]["zeros"] if name.endswith("weight")]
    plots = []
    for number, name in enumerate(layers, start=1):
        series = [
            Series(words, content["steps"], content["zeros"][name], "-", MARKS[index % 8], COLOURS[index % 8], 1.1)
            for index, (words, _, content) in enumerate(named)
            if name in content["zeros"]
        ]
        title = f"layer {number} of {len(layers)}"
        plots.append(Plot(title, "step", "zero coordinates", series=series, y_range=(-0.03, 1.03)))
    return draw(plots, size=_SMALL, shared_y=True)


def _embedding(factor: FactorResult, named: Sequence[tuple[str, FactorCellScores, dict[str, Any]]]) -> Panel:
    rows, plots = [], []
    for words, cell, content in named:
        classes = content["class_names"]
        series, points, labels = [], np.array(content["points"]), np.array(content["labels"])
        for label, name in enumerate(classes):
            shown = name if len(classes) <= _NAMED_CLASSES else ""
            xs, ys = points[labels == label].T.tolist()
            series.append(Series(shown, xs, ys, "", "o", f"C{label % 10}"))
        plots.append(Plot(words, series=series, x_ticks={}, y_ticks={}))
        agreement, chance = (percent(content[key]) for key in ("agreement", "chance"))
        rows.append([words, format_score("mse", cell.number("mse")), agreement, chance])
    description = "t-SNE of the released models, one plot per value"
    return Panel(
        f"{factor.title}: embedding of the released models",
        "t-SNE of the released models' weights, one point per model, colored by the class of the unknown image. If "
        "models of one class are close to each other, a reconstructor can learn from them.",
        [Picture(draw(plots, size=_SMALL), description, f"{factor.name}_embedding.svg")],
        header=["", "MSE", "Neighbors of the same class", "By chance"],
        rows=rows,
    )


def _seeds(factor: FactorResult, named: Sequence[tuple[str, FactorCellScores]]) -> Panel:
    followed = min(_FOLLOWED, *(len(cell.errors) for _, cell in named))
    labels = ("", "seed of the initial weights", "squared error")
    samples = {words: cell.errors for words, cell in named}
    boxes = Plot(*labels, samples=samples, boxes=True, levels=_oracle(named[0][1]))
    series = [
        Series("", range(len(named)), [cell.errors[i] for _, cell in named], "-", "o", f"C{i % 10}", 0.7)
        for i in range(followed)
    ]
    lines = Plot(*labels, series=series, x_ticks={words: index for index, (words, _) in enumerate(named)})
    pairs = [rank_correlation(a.errors, b.errors) for (_, a), (_, b) in combinations(named, 2)]
    correlations = [value for value in pairs if math.isfinite(value)]  # none of errors that are all equal
    told = "not defined, as all errors of a seed are equal"
    if correlations:
        told = f"{fmean(correlations):.2f} on average: 1 would mean that the same images are hard whatever the initial"
        told += " weights"
    means = [fmean(cell.errors) for _, cell in named]
    low, high = (format_score("mse", value) for value in (min(means), max(means)))
    drawn = draw([boxes, lines], size=(4.3, 3.6))
    return Panel(
        f"{factor.title}: the same target images",
        f"Errors of all target images under {len(named)} seeds, and of the first {followed} followed over the seeds. "
        f"Means lie between {low} and {high}; the rank correlation of the target images' errors between two seeds is "
        f"{told}.",
        [Picture(drawn, "Errors of the target images by seed", f"{factor.name}_targets.svg")],
    )
