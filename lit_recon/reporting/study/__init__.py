"""Two-layer studies: errors of attacks and bounds over sizes, noise and defenses, as slopes, tables and one figure."""

from __future__ import annotations

from lit_recon.reporting.study.curves import rate_curves, strength_curves
from lit_recon.reporting.study.results import CellFigures, Study

__all__ = ["CellFigures", "Study", "rate_curves", "strength_curves"]
