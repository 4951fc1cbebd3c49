"""A study's figures as tables: one per factor for the page, one of all cells as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any, NamedTuple

from lit_recon.reporting.factors.results import FactorResult, FactorStudy, Point
from lit_recon.reporting.formats import ABSENT, MISSING, format_printed, format_score

_FIGURES = (
    "mse",
    "mse_std",
    "oracle_mse",
    "baseline_mean_image_mse",
    "success_rate",
    "psnr",
    "ssim",
    "lpips",
    "kl",
    "label_accuracy",
    "accuracy",
    "train_accuracy",
    "membership_auc",
    "certified_rate",
    "epsilon",
    "noise_multiplier",
    "n_parameters",
    "n",
    "n_fixed",
    "n_shadow",
    "seed",
    "seconds",
)


class _Column(NamedTuple):
    """A column of a factor's table; one that may be left out is shown where a value has it."""

    title: str
    text: Callable[[Point], str]
    optional: bool = False


def factor_table(study: FactorStudy, factor: FactorResult) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a factor: a row per value, those of the base marked."""
    columns = [
        _Column("MSE", _mse),
        _Column("of nearest other", lambda point: _times(point.ratio)),
        _Column("Mean image", lambda point: _score(point, "baseline_mean_image_mse", "mse")),
        _Column("Nearer than it", lambda point: _share(point, "success_rate")),
        _Column("LPIPS", lambda point: _score(point, "lpips"), optional=True),
        _Column("KL", lambda point: _score(point, "kl"), optional=True),
        _Column("Certified", lambda point: _share(point, "certified_rate"), optional=True),
        _Column("Accuracy", lambda point: _share(point, "accuracy")),
        _Column("on known images", lambda point: _share(point, "train_accuracy"), optional=True),
        _Column("Membership AUC", lambda point: _two(point.mean("membership_auc")), optional=True),
        _Column("Epsilon", lambda point: _plain(point.mean("epsilon")), optional=True),
        _Column("Noise", lambda point: _plain(point.mean("noise_multiplier")), optional=True),
        *(_bound_column(index, kappa) for index, kappa in enumerate(study.kappas)),
        _Column("Paper", lambda point: format_printed("mse", point.paper), optional=True),
    ]
    points = factor.points
    shown = [
        column for column in columns if not column.optional or any(column.text(p) not in _EMPTY for _, p in points)
    ]
    rows = [
        [f"{words} (base)" if study.is_base(point) else words, *(column.text(point) for column in shown)]
        for words, point in points
    ]
    return [factor.axis.capitalize(), *(column.title for column in shown)], rows


def csv_table(study: FactorStudy) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of all cells: one per factor, value and seed, the base first."""
    named = [("base", "", "", study.base)]
    for factor in study.factors:
        named += [(factor.name, line.name, point.label, point) for line in factor.lines for point in line.points]
    rows: list[list[Any]] = []
    for name, line, label, point in named:
        for cell in point.cells:
            figures = [cell.number(name) for name in _FIGURES]
            where = str(cell.folder.path.relative_to(study.folder.path))
            rows.append([name, line, label, *figures, point.paper, cell.reason, where])
    return ["factor", "line", "value", *_FIGURES, "paper_mse", "reason", "folder"], rows


def csv_text(study: FactorStudy) -> str:
    """`csv_table` as a file."""
    header, rows = csv_table(study)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue()


#: What stands where there is no figure.
_EMPTY = (ABSENT, MISSING)


def _mse(point: Point) -> str:
    value = point.mean("mse")
    return MISSING if value is None else f"{format_score('mse', value)} ± {format_score('mse', point.spread)}"


def _score(point: Point, key: str, kind: str = "") -> str:
    value = point.mean(key)
    return ABSENT if value is None else format_score(kind or key, value)


def _share(point: Point, key: str) -> str:
    value = point.mean(key)
    return ABSENT if value is None else f"{value:.0%}"


def _times(value: float | None) -> str:
    return ABSENT if value is None else f"× {value:.2f}"


def _two(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"


def _plain(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.4g}"


def _bound_column(index: int, kappa: float) -> _Column:
    def text(point: Point) -> str:
        return f"{point.bounds[index]:.3g}" if point.bounds else ABSENT

    return _Column(f"Bound, κ {kappa:g}", text, optional=True)
