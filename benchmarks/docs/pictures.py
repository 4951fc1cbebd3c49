"""Plots of docs/images, which `python -m benchmarks.docs --write` draws from records.

A picture ends in a digest of its points, so that one of older records is noticed whatever draws it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.docs import study
from benchmarks.docs.figures import Content, Figures
from benchmarks.record import ROOT
from lit_recon.reporting.plots import Plot, draw

FOLDER = ROOT / "docs" / "images"
#: By file name the records and what is plotted of them.
PICTURES: dict[str, tuple[str, Callable[[Sequence[Content]], list[Plot]]]] = {
    "liu2025_cost.svg": ("all liu2025_table4_small_**", study.cost_plots),
}


def write(figures: Figures, folder: Path = FOLDER) -> None:
    """Draw the pictures that are missing or of other records."""
    for name in outdated(figures, folder):
        plots = _plots(figures, name)
        content = draw(plots, columns=len(plots), size=(5.6, 4.6), shared_y=True)
        (folder / name).write_bytes(content.rstrip() + f"\n<!-- {_digest(plots)} -->\n".encode())


def outdated(figures: Figures, folder: Path = FOLDER) -> list[str]:
    """Names of pictures that are missing or of other records."""
    found = []
    for name in PICTURES:
        path = folder / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if f"<!-- {_digest(_plots(figures, name))} -->" not in text:
            found.append(name)
    return found


def _plots(figures: Figures, name: str) -> list[Plot]:
    records, plotted = PICTURES[name]
    return plotted(figures.find(records))


def _digest(plots: Sequence[Plot]) -> str:
    """The same for points that are equal up to rounding."""
    content = json.dumps([_rounded(asdict(plot)) for plot in plots], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return f"{value:.4g}" if isinstance(value, float) else value
