"""Studies of factors: what helps and what hinders an attack on released models, as tables, curves and pictures."""

from __future__ import annotations

from lit_recon.reporting.factors.page import write_page
from lit_recon.reporting.factors.results import CellFigures, FactorResult, FactorStudy, Line, Point
from lit_recon.reporting.factors.tables import csv_table

__all__ = ["CellFigures", "FactorResult", "FactorStudy", "Line", "Point", "csv_table", "write_page"]
