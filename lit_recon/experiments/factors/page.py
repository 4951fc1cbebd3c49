"""The files that a study of factors leaves behind: the page, the table, the drawings, and last of all the record."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lit_recon.experiments.factors.curves import bound_curves, extremes, factor_curve, factor_galleries, is_private
from lit_recon.experiments.factors.diagnostics import measured_panels, rank_correlation
from lit_recon.experiments.factors.results import FactorResult, FactorStudy, Point
from lit_recon.io.files import write_bytes, write_text
from lit_recon.reporting.pages import Panel, picture, render
from lit_recon.reporting.provenance import environment, paper_of
from lit_recon.reporting.record import read_victims
from lit_recon.reporting.settings import flatten
from lit_recon.reporting.wording import ABSENT, MISSING, format_printed, format_score, measure_of
from lit_recon.reporting.writing import write_metrics

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


_LEGEND = (
    "± is the standard error over the targets or, with several seeds, over these. The second column is the error over "
    "that of the image nearest to the target among all others: below 1 the paper calls an attack successful. Then the "
    "share of targets for which it holds. Accuracy is that of the released models."
)
#: Scores of every target that are set beside its squared error.
_OTHER_SCORES = ("ssim", "lpips", "kl", "loss")


def write_page(folder: Path) -> Path:
    """Write everything about a study into its folder, from the files of its cells alone.

    Raises:
        MissingDataError: the folder holds no study.
        CorruptFileError: one of its files, or of its cells' files, is malformed.
    """
    study = FactorStudy.read(folder)
    panels = _base_panels(study)
    for factor in study.factors:
        panels += _factor_panels(study, factor)
    write_text(study.folder.path / "factors.csv", csv_text(study))
    facts = environment()
    failed = [(cell.folder.path.name, cell.reason) for cell in study.cells if cell.reason]
    run = study.folder
    page = render(
        "factors.html.j2",
        name=str(study.settings.get("name") or run.path.resolve().name),
        paper=paper_of(study.settings),
        findings=study.findings(),
        panels=panels,
        failed=failed,
        settings=flatten(study.settings),
        created=str(facts.get("created") or ""),
        version=str(facts.get("version_lit_recon") or ""),
    )
    write_text(run.report, page)
    write_metrics(run, {**study.record(), **facts})
    return run.report


def _base_panels(study: FactorStudy) -> list[Panel]:
    """The targets that are easiest and hardest in the base, and how the scores of all targets agree."""
    drawing = extremes(study.base.cells)
    if drawing is None:
        return []
    write_bytes(study.folder.figures / "base.png", drawing)
    cell = study.base.known[0]
    victims = read_victims(cell.folder.victims)
    scores = {name: [row.scores.get(name) for row in victims] for name in _OTHER_SCORES}
    scores["loss"] = [row.loss for row in victims]
    rows = []
    for name, values in scores.items():
        known = [value for value in values if value is not None]
        if len(known) == len(victims) > 1:
            words = "the attacker's own uncertainty" if name == "loss" else measure_of(name).name
            rows.append([words, f"{rank_correlation(cell.errors, known):+.2f}"])
    return [
        Panel(
            "Base: easiest and hardest targets",
            f"Every factor below varies one thing about this setting, whose MSE is "
            f"{format_score('mse', study.base.mean('mse'))}. Left the targets with the smallest errors, right those "
            "with the largest.",
            pictures=[(picture(drawing, "png"), "Targets with the smallest and the largest errors")],
            header=["Score of a target", "Rank correlation with its squared error"],
            rows=rows,
        )
    ]


def _factor_panels(study: FactorStudy, factor: FactorResult) -> list[Panel]:
    """The section of a factor, then those of its measures; their drawings become files of their own."""
    pictures = []
    if any(point.known for _, point in factor.points):
        curve = factor_curve(study, factor)
        write_bytes(study.folder.figures / f"{factor.name}.svg", curve)
        write_bytes(study.folder.figures / f"{factor.name}.png", factor_curve(study, factor, "png"))
        pictures.append((picture(curve, "svg"), f"Error of the attack by {factor.title}"))
    if is_private(factor):
        bounds = bound_curves(study, factor)
        write_bytes(study.folder.figures / f"{factor.name}_bounds.svg", bounds)
        pictures.append((picture(bounds, "svg"), "Bounds on the chance of reconstruction against epsilon"))
    for number, gallery in enumerate(factor_galleries(factor)):
        name = f"{factor.name}_gallery{f'_{number}' if number else ''}.png"
        write_bytes(study.folder.figures / name, gallery)
        pictures.append((picture(gallery, "png"), f"Targets and reconstructions by {factor.title}"))
    header, rows = factor_table(study, factor)
    where = f"In the paper: {factor.source}." if factor.source else ""
    lead = " ".join(part for part in (factor.note, where) if part)
    note = _LEGEND if factor is study.factors[0] else ""
    found = [Panel(factor.title, lead, pictures=pictures, header=header, rows=rows, note=note)]
    for measured in measured_panels(factor):
        for name, content in measured.files.items():
            write_bytes(study.folder.figures / name, content)
        found.append(measured.panel)
    return found
