"""How the errors of all targets are distributed, beside what needs no attack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lit_recon.reporting.drawing import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BINS = 40
_STYLES = ("-", "--", "-.", ":")


def error_histogram(errors: Mapping[str, Sequence[float]], levels: Mapping[str, float]) -> Figure:
    """Shares of the targets by squared error, and upright lines to compare them with.

    Args:
        errors: of all targets, by the name of the attack or case; one or more of each.
        levels: by name.
    """
    figure = new_figure(6.8, 3.4)
    panel = figure.subplots()
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlabel("squared error of a target", fontsize=9)
    panel.set_ylabel("share of the targets", fontsize=9)
    top = max([*levels.values(), *(value for own in errors.values() for value in own)]) or 1.0
    for index, (name, own) in enumerate(errors.items()):
        panel.hist(
            own,
            bins=_BINS,
            range=(0, top),
            weights=[1 / len(own)] * len(own),
            alpha=0.8,
            label=name,
            color=COLOURS[index % len(COLOURS)],
            histtype="stepfilled" if index == 0 else "step",
        )
    for index, (name, value) in enumerate(levels.items()):
        panel.axvline(value, label=name, color="#6b7280", linewidth=1.1, linestyle=_STYLES[index % len(_STYLES)])
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure
