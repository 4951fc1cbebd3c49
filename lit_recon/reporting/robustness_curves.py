"""What privacy buys against reconstruction, over epsilon: bounds, attacks beside them, and the price in accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lit_recon.reporting.plots import COLOURS, MARKS, new_figure, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Left and right of the epsilons, of which there may be one, as a factor.
_MARGIN = 1.5
#: Smallest chance that is drawn.
_FLOOR = 1e-5


class Measured(NamedTuple):
    """A success rate at an epsilon, with the ends of its confidence interval."""

    epsilon: float
    rate: float
    low: float
    high: float


class Bounded(NamedTuple):
    """A bound over epsilon, a looser one beside it, and what attacks reached.

    Attributes:
        tight: `(epsilons, gammas)`.
        loose: the same of another bound; empty for none.
        measured: of an attack; empty for none.
    """

    tight: tuple[Sequence[float], Sequence[float]]
    loose: tuple[Sequence[float], Sequence[float]] = ((), ())
    measured: Sequence[Measured] = ()


def robustness_curves(curves: Mapping[str, Bounded], tight: str, loose: str = "", linear: bool = False) -> bytes:
    """A picture (SVG) of chances of success against epsilon.

    Args:
        curves: by name.
        tight: name of the solid lines' bound.
        loose: of the dashed ones'.
        linear: chances on a linear axis rather than a logarithmic one.
    """
    figure = new_figure(6.6, 4.4)
    panel = figure.subplots()
    _axes(panel, "chance of success", [epsilon for curve in curves.values() for epsilon in curve.tight[0]])
    if linear:
        panel.set_ylim(-0.03, 1.05)
    else:
        panel.set_yscale("log")
        panel.set_ylim(_FLOOR, 1.6)
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        panel.plot(*curve.tight, color=colour, linewidth=1.8, label=name)
        if curve.loose[0]:
            panel.plot(*curve.loose, color=colour, linewidth=1.1, linestyle=(0, (4, 2)))
        if curve.measured:
            epsilons, rates, lows, highs = zip(*curve.measured, strict=True)
            below = [max(0.0, rate - low) for rate, low in zip(rates, lows, strict=True)]
            above = [max(0.0, high - rate) for rate, high in zip(rates, highs, strict=True)]
            panel.errorbar(
                epsilons,
                [max(rate, _FLOOR) for rate in rates],
                yerr=(below, above),
                linestyle="",
                marker=MARKS[index % len(MARKS)],
                markersize=5,
                capsize=2.5,
                linewidth=1,
                color=colour,
            )
    panel.plot([], [], color="#3b4252", linewidth=1.8, label=tight)
    if loose:
        panel.plot([], [], color="#3b4252", linewidth=1.1, linestyle=(0, (4, 2)), label=loose)
    if any(curve.measured for curve in curves.values()):
        panel.plot([], [], color="#3b4252", linestyle="", marker="o", markersize=5, label="attack, 95 % interval")
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    return svg(figure)


def error_and_accuracy(
    epsilons: Sequence[float],
    errors: Sequence[float],
    spreads: Sequence[float],
    accuracies: Sequence[float],
    levels: Mapping[str, float],
    without: float | None = None,
) -> bytes:
    """A picture (SVG) of the attack's error and the released models' accuracy against epsilon.

    Args:
        epsilons: budgets.
        errors: mean squared error at each.
        spreads: standard error of each.
        accuracies: of released models at each, in [0, 1].
        levels: errors to compare with, by name.
        without: accuracy without noise; None where it was not measured.
    """
    figure = new_figure(6.6, 3.8)
    panel = figure.subplots()
    _axes(panel, "mean squared error", epsilons)
    panel.errorbar(epsilons, errors, yerr=spreads, color=COLOURS[0], marker="o", capsize=2.5, label="attack (left)")
    for (name, level), style in zip(levels.items(), ("--", ":", "-.", (0, (6, 1, 1, 1))), strict=False):
        panel.axhline(level, color="#6b7280", linewidth=1, linestyle=style, label=f"{name} (left)")
    panel.set_ylim(bottom=0)
    right = panel.twinx()
    right.plot(epsilons, accuracies, color=COLOURS[1], marker="s", label="accuracy (right)")
    if without is not None:
        right.axhline(without, color=COLOURS[1], linewidth=1, linestyle="--", label="accuracy without noise (right)")
    right.set_ylim(0, 1)
    right.set_ylabel("accuracy of released models")
    right.spines[["top"]].set_visible(False)
    handles = [handle for axes in (panel, right) for handle in axes.get_legend_handles_labels()[0]]
    labels = [label for axes in (panel, right) for label in axes.get_legend_handles_labels()[1]]
    figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    return svg(figure)


def _axes(panel: Axes, label: str, epsilons: Sequence[float]) -> None:
    panel.set_xscale("log")
    panel.set_xlim(min(epsilons) / _MARGIN, max(epsilons) * _MARGIN)
    panel.set_xlabel("epsilon")
    panel.set_ylabel(label)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
