"""Drawings of a two-layer study: errors and bounds over what is varied, and what each defense adds to the bound."""

from __future__ import annotations

import io
import math
from typing import Any

from lit_recon.reporting.drawing import COLOURS, MARKS, new_figure, svg
from lit_recon.reporting.study.results import SYMBOLS, CellFigures, Study

_GREY = "#6b7280"
#: Bounds in the drawing: key, words, line.
_BOUNDS = (("unit_norm", "Cramér-Rao, norms known", "-"), ("relaxed", "relaxed by the trace", ":"))


def rate_curves(study: Study, kind: str = "svg") -> bytes:
    """Errors of all attacks and the bounds over d, m, B and s, without a defense; both axes logarithmic.

    Args:
        study: with at least one sweep of two values.
        kind: `svg` or `png`.
    """
    axes = [axis for axis in SYMBOLS if len(study.sweep(axis)) > 1]
    figure = new_figure(8.6, 3.5 * math.ceil(len(axes) / 2))
    panels = figure.subplots(math.ceil(len(axes) / 2), 2, squeeze=False, sharey=True).ravel()
    for panel, axis in zip(panels, axes, strict=False):
        _draw(panel, study, axis)
    for panel in panels[len(axes) :]:
        panel.set_visible(False)
    for panel in panels[::2]:
        panel.set_ylabel("root mean squared error of an input")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    if kind == "svg":
        return svg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def strength_curves(study: Study) -> bytes:
    """How many times larger each defense makes the bound (lines) and each attack's error (marks), by strength (SVG).

    Of defenses at two strengths or more.
    """
    names = [name for name in study.defenses if len(study.strengths(name)) > 1]
    columns = 2 if len(names) <= 4 else 3
    rows = max(1, math.ceil(len(names) / columns))
    figure = new_figure(8.6, 2.9 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, name in zip(panels, names, strict=False):
        cells = study.strengths(name)
        places = [cell.strength or 0.0 for cell in cells]
        _style(panel, str(study.defenses[name]["title"]))
        panel.set_yscale("log")
        panel.axhline(
            study.base.bound("unit_norm"), color=_GREY, linewidth=1, linestyle="--", label="bound, no defense"
        )
        panel.plot(places, [_shown(cell, "unit_norm") for cell in cells], color="black", marker=".", label="bound")
        for index, (attack, title) in enumerate(study.attacks.items()):
            values = [cell.error(attack) or math.nan for cell in cells]
            style = {"marker": MARKS[index], "color": COLOURS[index], "markersize": 5, "linewidth": 0.8}
            panel.plot(places, values, label=title, **style)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return svg(figure)


def _draw(panel: Any, study: Study, axis: str) -> None:
    cells = study.sweep(axis)
    places = [cell.sizes[axis] for cell in cells]
    _style(panel, f"over {SYMBOLS[axis]}")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel(SYMBOLS[axis])
    panel.set_xticks(places, [f"{place:g}" for place in places])
    panel.minorticks_off()
    for key, words, line in _BOUNDS:
        panel.plot(
            places, [_shown(cell, key) for cell in cells], color="black", linewidth=1.2, linestyle=line, label=words
        )
    panel.plot(
        places,
        [cell.van_trees for cell in cells],
        color=_GREY,
        linewidth=1.2,
        linestyle="--",
        label="van Trees, any attack",
    )
    series = {**study.attacks, "likelihood": "maximum likelihood, from the truth"}
    for index, (name, title) in enumerate(series.items()):
        values = [cell.error(name) or math.nan for cell in cells]
        colour = _GREY if name == "likelihood" else COLOURS[index]
        panel.plot(
            places,
            values,
            marker="+" if name == "likelihood" else MARKS[index],
            color=colour,
            markersize=6,
            markerfacecolor="none",
            linewidth=0,
            label=title,
        )


def _style(panel: Any, title: str) -> None:
    panel.set_title(title, fontsize=10)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def _shown(cell: CellFigures, bound: str) -> float:
    value = cell.bound(bound)
    return value if math.isfinite(value) else math.nan
