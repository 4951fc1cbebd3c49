"""ROC curves on logarithmic axes, where an attack shows whether it is ever sure of a member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lit_recon.reporting.drawing import COLOURS, new_figure, svg


def roc_curves(curves: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]], floor: float) -> bytes:
    """A picture (SVG) of ROC curves.

    Args:
        curves: `(false positive rates, true positive rates)` by panel, then by the name of the attack.
        floor: smallest rate that the number of games can show; smaller ones are drawn there.
    """
    figure = new_figure(4.6 * len(curves), 3.8)
    panels = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
    for panel, (title, attacks) in zip(panels, curves.items(), strict=True):
        panel.set_title(title, fontsize=10)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlim(floor, 1.1)
        panel.set_ylim(floor, 1.1)
        panel.set_xlabel("false positive rate")
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.plot([floor, 1], [floor, 1], color="#6b7280", linewidth=1, linestyle="--", label="chance")
        for index, (name, (false, true)) in enumerate(attacks.items()):
            shown = [max(rate, floor) for rate in false], [max(rate, floor) for rate in true]
            style = ("-", (0, (5, 2)), (0, (1.5, 1.5)), "-.")[index % 4]
            panel.plot(*shown, color=COLOURS[index], linewidth=1.8, linestyle=style, label=name, clip_on=False)
        panel.legend(frameon=False, fontsize=8, loc="lower right")
    panels[0].set_ylabel("true positive rate")
    return svg(figure)
