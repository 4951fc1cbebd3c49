"""What the four papers print beside what is measured here, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.docs.fidelity import balle2022_figures, chen2024, liu2025, runkel2024
from benchmarks.docs.fidelity.items import Counts, Item, counts, listed
from benchmarks.docs.figures import Figures
from benchmarks.docs.tables import markdown, table

#: Items of every paper.
PAPERS: Mapping[str, Sequence[Item]] = {
    "liu2025": liu2025.ITEMS,
    "chen2024": chen2024.ITEMS,
    "runkel2024": runkel2024.ITEMS,
    "balle2022": balle2022_figures.ITEMS,
}
_TITLES = {
    "liu2025": "Liu et al. 2025",
    "chen2024": "Chen et al. 2024",
    "runkel2024": "Runkel et al. 2024",
    "balle2022": "Balle et al. 2022",
}

for _name, _items in PAPERS.items():
    table(f"fidelity_{_name}")(partial(listed, _items))


@table("fidelity_counts")
def totals(figures: Figures, page: Path) -> str:
    """How many items of every paper are measured and missing."""
    found = {_TITLES[name]: counts(items, figures) for name, items in PAPERS.items()}
    found["all"] = Counts(*map(sum, zip(*found.values(), strict=True)))
    rows = [[title, str(sum(own)), *map(str, own)] for title, own in found.items()]
    return markdown(["paper", "rows", "measured", "measured on other data", "missing", "no result"], rows)
