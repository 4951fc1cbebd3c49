"""The measured numbers of README.md and the pages of docs/, read from the records that hold them."""

from benchmarks.docs import (
    audits,
    defended,
    fidelity,
    fuzzing,
    grids,
    released,
    reliability,
    speed,
    study,
    trainset,
    two_layer,
    updates,
)
from benchmarks.docs.figures import Figures
from benchmarks.docs.marks import Page, examine
from benchmarks.docs.tables import make
from benchmarks.record import ROOT

__all__ = [
    "PAGES",
    "audits",
    "defended",
    "examine_pages",
    "fidelity",
    "fuzzing",
    "grids",
    "released",
    "reliability",
    "speed",
    "study",
    "trainset",
    "two_layer",
    "updates",
]

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def examine_pages(figures: Figures) -> list[Page]:
    """Compare all pages with the records."""
    return [examine(path, figures, make) for path in PAGES]
