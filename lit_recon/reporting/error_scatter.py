"""Errors against what an attack, which does not know the truth, estimated them to be: every point should lie below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lit_recon.reporting.drawing import COLOURS, MARKS, new_figure, svg

#: Errors below the rounding of a pixel are drawn there: a logarithmic axis has no zero.
_FLOOR = 1e-17


def error_scatter(points: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    """A picture (SVG) of `(estimate, error)` pairs by the name of their model, both axes logarithmic."""
    figure = new_figure(5.6, 4.4)
    panel = figure.subplots()
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("error estimate, known to the attacker")
    panel.set_ylabel("largest error of a pixel")
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    everything = [max(value, _FLOOR) for pairs in points.values() for pair in pairs for value in pair]
    for index, (name, pairs) in enumerate(points.items()):
        if pairs:
            estimates, errors = zip(*pairs, strict=True)
            panel.plot(
                estimates,
                [max(error, _FLOOR) for error in errors],
                linestyle="",
                marker=MARKS[index % len(MARKS)],
                color=COLOURS[index % len(COLOURS)],
                markersize=4.5,
                alpha=0.75,
                label=name,
            )
    if everything:
        span = (min(everything), max(everything))
        panel.plot(span, span, color="#6b7280", linewidth=1, linestyle="--", label="error = estimate", zorder=0)
        panel.axhspan(panel.get_ylim()[0], 1 / 255, color="#dcecea", alpha=0.4, zorder=-1, linewidth=0)
        panel.legend(frameon=False, fontsize=8)
    return svg(figure)
