"""Losses on one image, of models that were trained on it and of models that were not, one panel per setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lit_recon.reporting.drawing import COLOURS, new_figure, svg

#: From this many different values on, losses are drawn as a histogram, else as lines.
_LINES = 5


def loss_histogram(losses: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> bytes:
    """A picture (SVG): `(losses with, losses without)` the image by the title of their panel."""
    figure = new_figure(5.0 * len(losses), 3.4)
    panels = figure.subplots(1, len(losses), squeeze=False)[0]
    for panel, (title, (members, others)) in zip(panels, losses.items(), strict=True):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("loss on the image")
        panel.set_yticks([])
        panel.spines[["top", "right", "left"]].set_visible(False)
        edges = np.histogram_bin_edges(np.concatenate([members, others]), bins=40)
        for values, name, colour in ((others, "without the image", COLOURS[1]), (members, "with it", COLOURS[0])):
            if len(set(values)) < _LINES:
                for index, value in enumerate(values):
                    label = f"{name} ({len(values)} model{'s' if len(values) > 1 else ''})"
                    panel.axvline(value, color=colour, linewidth=2, label=label if not index else None)
            else:
                weights = np.full(len(values), 1 / len(values))
                label = f"{name} ({len(values)} models)"
                panel.hist(values, bins=edges, weights=weights, color=colour, alpha=0.55, label=label)
        panel.legend(frameon=False, fontsize=8)
    return svg(figure)
