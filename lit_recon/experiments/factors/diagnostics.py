"""Why a factor matters: gradients of the unknown images, released models in the plane, and targets under many seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import Any, NamedTuple

from lit_recon.experiments.factors.curves import drawn
from lit_recon.experiments.factors.results import FactorCellScores, FactorResult, Point
from lit_recon.reporting.pages import Panel, picture
from lit_recon.reporting.plots import COLOURS, MARKS, error_histogram, new_figure
from lit_recon.reporting.wording import ABSENT

#: Panels of a drawing side by side.
_COLUMNS = 3
#: Targets whose errors are followed over all seeds, and panels of scatters at most.
_FOLLOWED, _MOST = 10, 6


class Pictures(NamedTuple):
    """What a measure adds to the page: a section, and the files of its drawings by name."""

    panel: Panel
    files: dict[str, bytes]


def measured_panels(factor: FactorResult) -> list[Pictures]:
    """The sections that a factor's cases and measures add; nothing for values without figures."""
    found = [
        _errors(factor),
        *([_gradients(factor)] if "gradients" in factor.measures else []),
        *([_embedding(factor)] if "embedding" in factor.measures else []),
        *([_seeds(factor)] if factor.setting == "seed" else []),
    ]
    return [pictures for pictures in found if pictures is not None]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; not a number where one of the two is constant.

    >>> rank_correlation([1, 2, 3, 4], [1, 4, 9, 20])
    1.0
    """
    from scipy.stats import spearmanr

    if len(set(a)) < 2 or len(set(b)) < 2:
        return math.nan
    return float(spearmanr(a, b).statistic)


def _errors(factor: FactorResult) -> Pictures | None:
    """How the targets' errors are distributed, where a factor sets a few cases side by side."""
    named = [(words, cell) for words, point in factor.points if (cell := _first(point)) is not None]
    if factor.setting or not 2 <= len(named) <= _MOST:
        return None
    oracle = named[0][1].number("oracle_mse")
    levels = {} if oracle is None else {"nearest other image, mean": oracle}
    file = drawn(error_histogram({words: cell.errors for words, cell in named}, levels), "svg")
    return Pictures(
        Panel(
            f"{factor.title}: error by target",
            "How many of the targets the attack comes how close to, in each case.",
            pictures=[(picture(file, "svg"), "Histograms of the squared error over all targets")],
        ),
        {f"{factor.name}_errors.svg": file},
    )


def _gradients(factor: FactorResult) -> Pictures | None:
    named = _measured(factor, "gradients")
    if not named:
        return None
    scatter = new_figure(3.3 * min(_COLUMNS, len(named)), 2.9 * math.ceil(min(len(named), _MOST) / _COLUMNS))
    rows = []
    panels = _grid(scatter, min(len(named), _MOST))
    for index, (words, cell, content) in enumerate(named):
        norms, errors = _means(content["norms"]), cell.errors
        errors = errors[: len(norms)]
        correlation = rank_correlation(norms, errors)
        zeros = {name: fmean(shares) for name, shares in content["zeros"].items() if name.endswith("weight")}
        rows.append(
            [
                words,
                f"{fmean(errors):.4f}",
                f"{fmean(norms):.3g}",
                f"{correlation:+.2f}" if math.isfinite(correlation) else ABSENT,
                ", ".join(f"{share:.0%}" for share in zeros.values()),
            ]
        )
        if index < len(panels):
            panel = panels[index]
            panel.set_title(words, fontsize=9)
            panel.plot(norms, errors, linestyle="", marker="o", markersize=3, color=COLOURS[0], alpha=0.7)
            panel.set_xlabel("gradient norm", fontsize=8)
            panel.set_ylabel("squared error", fontsize=8)
    files = {f"{factor.name}_gradients.svg": drawn(scatter, "svg"), f"{factor.name}_zeros.svg": _zeros(named)}
    described = ("Squared error of every target over the norm of its gradient", "Share of zero coordinates")
    return Pictures(
        Panel(
            f"{factor.title}: gradients of the unknown image",
            "The gradient of the unknown image's loss with respect to all weights, at some points along training: its "
            "norm, averaged over these points, beside the attack's error on that image; and the share of its "
            "coordinates that are exactly zero, which say nothing about the image.",
            pictures=[(picture(file, "svg"), words) for file, words in zip(files.values(), described, strict=True)],
            header=["", "MSE", "Mean norm", "Rank correlation with the error", "Zero coordinates, by layer"],
            rows=rows,
            note="A weight of the first layer has no gradient either where the image is black: compare values of the "
            "factor with each other, not with nothing.",
        ),
        files,
    )


def _zeros(named: Sequence[tuple[str, FactorCellScores, dict[str, Any]]]) -> bytes:
    """Shares of zero coordinates of every layer's weights along training."""
    layers = [name for name in named[0][2]["zeros"] if name.endswith("weight")]
    figure = new_figure(3.3 * min(_COLUMNS, len(layers)), 2.9 * math.ceil(len(layers) / _COLUMNS) + 0.4)
    for number, (name, panel) in enumerate(zip(layers, _grid(figure, len(layers)), strict=True), start=1):
        panel.set_title(f"layer {number} of {len(layers)}", fontsize=9)
        panel.set_xlabel("step", fontsize=8)
        panel.set_ylim(-0.03, 1.03)
        for index, (words, _, content) in enumerate(named):
            if name in content["zeros"]:
                style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKS[index % len(MARKS)], "markersize": 3.5}
                panel.plot(content["steps"], content["zeros"][name], linewidth=1.1, label=words, **style)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.supylabel("zero coordinates", fontsize=8)
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return drawn(figure, "svg")


def _embedding(factor: FactorResult) -> Pictures | None:
    named = _measured(factor, "embedding")
    if not named:
        return None
    figure = new_figure(3.2 * min(_COLUMNS, len(named)), 2.8 * math.ceil(len(named) / _COLUMNS) + 0.3)
    rows = []
    for panel, (words, cell, content) in zip(_grid(figure, len(named)), named, strict=True):
        panel.set_title(words, fontsize=9)
        panel.set_xticks([])
        panel.set_yticks([])
        for label, name in enumerate(content["class_names"]):
            own = [p for p, of in zip(content["points"], content["labels"], strict=True) if of == label]
            colour = f"C{label % 10}"
            panel.plot(*_columns(own), linestyle="", marker="o", markersize=3, color=colour, alpha=0.8, label=name)
        mse = cell.number("mse")
        agreement, chance = (f"{content[key]:.0%}" for key in ("agreement", "chance"))
        rows.append([words, ABSENT if mse is None else f"{mse:.4f}", agreement, chance])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) <= 10:
        figure.legend(handles, labels, loc="outside lower center", ncols=10, frameon=False, fontsize=7)
    file = drawn(figure, "svg")
    return Pictures(
        Panel(
            f"{factor.title}: released models in the plane",
            "t-SNE of the released models' weights, one point each, in the colour of the unknown image's class. Where "
            "models of one class lie together, a reconstructor has something to learn from.",
            pictures=[(picture(file, "svg"), "Layouts of the released models, a panel per value")],
            header=["", "MSE", "Neighbors of the same class", "By chance"],
            rows=rows,
        ),
        {f"{factor.name}_embedding.svg": file},
    )


def _seeds(factor: FactorResult) -> Pictures | None:
    named = [(words, point.known[0]) for words, point in factor.points if point.known]
    if len(named) < 2:
        return None
    figure = new_figure(8.6, 3.6)
    left, right = figure.subplots(1, 2)
    for panel in (left, right):
        _plain(panel)
        panel.set_xlabel("seed of the initial weights", fontsize=9)
        panel.set_ylabel("squared error", fontsize=9)
    left.boxplot([cell.errors for _, cell in named], tick_labels=[words for words, _ in named], flierprops={"ms": 3})
    for index in range(min(_FOLLOWED, *(len(cell.errors) for _, cell in named))):
        style = {"color": f"C{index % 10}", "marker": "o", "markersize": 3, "linewidth": 0.7}
        right.plot([words for words, _ in named], [cell.errors[index] for _, cell in named], **style)
    oracle = named[0][1].number("oracle_mse")
    if oracle is not None:
        left.axhline(oracle, color="#6b7280", linewidth=1, linestyle="--")
    correlations = [rank_correlation(a.errors, b.errors) for (_, a), (_, b) in combinations(named, 2)]
    file = drawn(figure, "svg")
    means = [fmean(cell.errors) for _, cell in named]
    return Pictures(
        Panel(
            f"{factor.title}: the same targets",
            f"Errors of all targets under {len(named)} seeds, and those of the first targets followed over the seeds. "
            f"Means lie between {min(means):.4f} and {max(means):.4f}; the rank correlation of the targets' errors "
            f"between two seeds is {fmean(correlations):.2f} on average: 1 would mean that the same targets are hard "
            "whatever the initial weights.",
            pictures=[(picture(file, "svg"), "Errors of the targets by seed")],
        ),
        {f"{factor.name}_targets.svg": file},
    )


def _measured(factor: FactorResult, kind: str) -> list[tuple[str, FactorCellScores, dict[str, Any]]]:
    """Words, run and content of every value that has such a measure, of its first seed."""
    found = []
    for words, point in factor.points:
        cell = _first(point)
        content = None if cell is None else cell.measure(kind)
        if cell is not None and content is not None:
            found.append((words, cell, content))
    return found


def _first(point: Point) -> FactorCellScores | None:
    return point.known[0] if point.known else None


def _grid(figure: Any, n: int) -> list[Any]:
    """`n` plain panels, three in a row."""
    rows = math.ceil(n / _COLUMNS)
    panels = list(figure.subplots(rows, min(_COLUMNS, n), squeeze=False).ravel())
    for panel in panels[n:]:
        panel.set_visible(False)
    for panel in panels[:n]:
        _plain(panel)
    return panels[:n]


def _plain(panel: Any) -> None:
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Mean over the rows of every column."""
    return [fmean(column) for column in zip(*rows, strict=True)]


def _columns(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]
