"""Attacked errors beside the bounds of their cells, and why a cell has none."""

from __future__ import annotations

import math

from lit_recon.reporting.evaluation.results import CellResult, Evaluation
from lit_recon.reporting.formats import MISSING, format_score
from lit_recon.reporting.panels import Panel


def bound_panels(evaluation: Evaluation) -> list[Panel]:
    """One section; none where no bound was asked for."""
    asked = [cell for cell in evaluation.attacked if cell.bound]
    if not asked:
        return []
    rows = [
        [evaluation.cell_title(cell), _root(cell), _shown(cell, "rmse"), _shown(cell, "unbiased_rmse")]
        for cell in asked
        if "reason" not in cell.bound
    ]
    why: dict[str, list[str]] = {}
    for cell in asked:
        if "reason" in cell.bound:
            titles = why.setdefault(str(cell.bound["reason"]), [])
            titles += [title] if (title := evaluation.title(cell.defense, cell.strength)) not in titles else []
    reasons = "; ".join(f"{', '.join(titles)}: {reason}" for reason, titles in why.items())
    return [
        Panel(
            "How close any attack could come",
            "Root of the mean squared error of a pixel, beside two bounds from the information in the noisy update "
            "(Fisher). "
            "Any attack: none whatever comes below, on average over images from a normal distribution with the mean "
            "and "
            "covariance of the public images (van Trees). Real images follow it only roughly: an attack that knows "
            "them "
            "better may come a little below. It is loose where single victims are far more exposed than others, as the "
            "information is averaged. Unbiased attacks: without any prior (Cramér-Rao); ∞ where the update leaves a "
            "direction open. What an attack with a smaller error brings back there comes from its prior. Both suppose "
            "that labels are known.",
            header=["Cell", "Attack", "Any attack", "Unbiased attacks"],
            rows=rows,
            note=f"No bound above 0 for {reasons}." if reasons else "",
        )
    ]


def _root(cell: CellResult) -> str:
    """Of the mean of squared errors, as bounds are; the mean of roots is less."""
    mse = cell.number("mse")
    return MISSING if mse is None else format_score("rmse", math.sqrt(mse))


def _shown(cell: CellResult, key: str) -> str:
    value = cell.bound.get(key)
    return format_score("rmse", value if isinstance(value, float) else math.inf)
