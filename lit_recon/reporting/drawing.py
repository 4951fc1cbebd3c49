"""What the drawings of pages share: colours, marks, and files that are the same for the same figures."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colours that stay apart for the colour-blind (Okabe and Ito), and marks for those who print in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b6470", "#8c6d1f")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def new_figure(width: float, height: float) -> Figure:
    """An empty drawing of so many inches."""
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    return Figure(figsize=(width, height), layout="constrained")


def svg(figure: Figure) -> bytes:
    """The drawing's file: without a date, and with fixed identities."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "lit_recon"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
