"""What a run leaves behind and how it is shown: the run folder, the record in it, and the HTML report.

The names are imported on first use, so that importing the room is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_recon.reporting.figures import image_grid
    from lit_recon.reporting.folder import IGNORED_SETTINGS, RunFolder
    from lit_recon.reporting.html import build_report, compare_report
    from lit_recon.reporting.provenance import environment
    from lit_recon.reporting.record import RunRecord
    from lit_recon.reporting.rows import LossCurve, VictimRow
    from lit_recon.reporting.writing import write_losses, write_metrics, write_tensors, write_victims

__all__ = [
    "IGNORED_SETTINGS",
    "LossCurve",
    "RunFolder",
    "RunRecord",
    "VictimRow",
    "build_report",
    "compare_report",
    "environment",
    "image_grid",
    "write_losses",
    "write_metrics",
    "write_tensors",
    "write_victims",
]

_HOMES = {
    "IGNORED_SETTINGS": "folder",
    "LossCurve": "rows",
    "RunFolder": "folder",
    "RunRecord": "record",
    "VictimRow": "rows",
    "build_report": "html",
    "compare_report": "html",
    "environment": "provenance",
    "image_grid": "figures",
    "write_losses": "writing",
    "write_metrics": "writing",
    "write_tensors": "writing",
    "write_victims": "writing",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
