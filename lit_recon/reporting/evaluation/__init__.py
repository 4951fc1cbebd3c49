"""Evaluations: many runs of defenses against attacks as one table, one scatter, one verdict per defense."""

from __future__ import annotations

from lit_recon.reporting.evaluation.galleries import gallery_grids
from lit_recon.reporting.evaluation.page import build_evaluation, summary_lines
from lit_recon.reporting.evaluation.results import CellResult, Evaluation
from lit_recon.reporting.evaluation.tables import csv_table

__all__ = ["CellResult", "Evaluation", "build_evaluation", "csv_table", "gallery_grids", "summary_lines"]
