"""What a defense costs against what it keeps: every strength of every defense as a point, with the Pareto front."""

from __future__ import annotations

import io
import logging
from typing import Any

from lit_recon.reporting.evaluation.judgement import Level, levels, pareto_front
from lit_recon.reporting.evaluation.results import Evaluation

#: Colours that stay apart for the colour-blind (Okabe and Ito), and marks for those who print in grey.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b6470", "#8c6d1f")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_GREY = "#6b7280"


def scatter(evaluation: Evaluation, kind: str) -> bytes:
    """Accuracy lost against the figure of the strongest attack: a panel per batch size, a row per kind of server.

    Args:
        evaluation: with trainings; without them the panels are empty and say so.
        kind: `svg` or `png`.

    Returns:
        The picture's file.
    """
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    sizes = evaluation.batch_sizes
    servers = (False, True) if evaluation.has_both_servers else (False,)
    figure = Figure(figsize=(5.4 * len(sizes) + 0.3, 4.1 * len(servers) + 0.5), layout="constrained")
    panels = figure.subplots(len(servers), len(sizes), squeeze=False, sharex="col", sharey=True)
    measure = evaluation.figure.measure
    keeps = "lower" if measure.better == "↑" else "higher"
    for honest, row in zip(servers, panels, strict=True):
        for panel, size in zip(row, sizes, strict=True):
            _draw(panel, evaluation, size, honest)
        row[0].set_ylabel(f"{measure.name} of the strongest attack  ({keeps}: keeps more)")
    for panel in panels[-1]:
        panel.set_xlabel("accuracy lost, in points")
    handles, labels = panels[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    buffer = io.BytesIO()
    # without a date, and with fixed identities, the same evaluation gives the same file
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "lit_recon"}):
        figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
    return buffer.getvalue()


def _draw(panel: Any, evaluation: Evaluation, size: int, honest: bool) -> None:
    known = levels(evaluation, size, honest)
    points = [level for level in known if level.price is not None and level.value is not None]
    who = ", honest servers alone" if honest else ", any server" if evaluation.has_both_servers else ""
    panel.set_title(f"batch {size}{who}", fontsize=10)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    if not points:
        panel.text(0.5, 0.5, "no price was measured", ha="center", va="center", transform=panel.transAxes)
        return
    for level in points:
        if level.strength is None:
            panel.plot(*_place(level), marker="o", color="black", markersize=8, linestyle="", label="no defense")
    for index, (name, title) in enumerate(evaluation.defenses.items()):
        own = [level for level in points if level.defense == name]
        if not own:
            continue
        xs, ys = zip(*map(_place, own), strict=True)
        colour, mark = _COLOURS[index % len(_COLOURS)], _MARKS[index % len(_MARKS)]
        panel.plot(xs, ys, marker=mark, color=colour, markersize=6, linewidth=0.9, alpha=0.9, label=title)
        for level, x, y in zip(own, xs, ys, strict=True):
            panel.annotate(
                f"{level.strength:g}", (x, y), textcoords="offset points", xytext=(5, 4), fontsize=7, color=colour
            )
    front = pareto_front(points)
    xs, ys = zip(*map(_place, front), strict=True)
    panel.plot(
        xs, ys, drawstyle="steps-post", color=_GREY, linewidth=1.2, linestyle="--", label="Pareto front", zorder=0
    )
    baseline = next((level.baseline for level in points if level.baseline is not None), None)
    if baseline is not None:
        panel.axhline(baseline, color=_GREY, linewidth=1, linestyle=":", label="nearest public image", zorder=0)


def _place(level: Level) -> tuple[float, float]:
    """Position of a level that has both figures."""
    return 100 * (level.price or 0.0), level.value or 0.0
