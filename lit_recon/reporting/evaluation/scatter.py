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
    """Accuracy lost against RMSE of the strongest attack, one panel per batch size.

    Args:
        evaluation: with trainings; without them the panels are empty and say so.
        kind: `svg` or `png`.

    Returns:
        The picture's file.
    """
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    sizes = evaluation.batch_sizes
    figure = Figure(figsize=(5.4 * len(sizes) + 0.3, 4.6), layout="constrained")
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for panel, size in zip(panels, sizes, strict=True):
        _draw(panel, evaluation, size)
    panels[0].set_ylabel("RMSE of the strongest attack  (higher: keeps more)")
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    buffer = io.BytesIO()
    # without a date, and with fixed identities, the same evaluation gives the same file
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "lit_recon"}):
        figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
    return buffer.getvalue()


def _draw(panel: Any, evaluation: Evaluation, size: int) -> None:
    points = [level for level in levels(evaluation, size) if level.price is not None and level.rmse is not None]
    panel.set_title(f"batch {size}", fontsize=10)
    panel.set_xlabel("accuracy lost, in points")
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
    return 100 * (level.price or 0.0), level.rmse or 0.0
