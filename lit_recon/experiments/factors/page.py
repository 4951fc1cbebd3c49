"""The files of a finished study of factors: page, table, plots, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lit_recon.experiments.factors.diagnostics import (
    bound_curves,
    correlation_in_words,
    extremes,
    factor_curve,
    factor_galleries,
    is_private,
    measured_panels,
    rank_correlation,
)
from lit_recon.experiments.factors.results import FactorResult, FactorStudy, Point
from lit_recon.io.files import write_bytes, write_text
from lit_recon.reporting.pages import Page, Panel, Picture
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.record import read_victims
from lit_recon.reporting.wording import (
    ABSENT,
    MISSING,
    format_printed,
    format_score,
    measure_of,
    percent,
    short,
    with_error,
)
from lit_recon.reporting.writing import csv_text, write_metrics

#: Columns of the table file.
_COLUMNS = (
    *("mse", "mse_std", "oracle_mse", "baseline_mean_image_mse", "success_rate", "psnr", "ssim", "lpips", "kl"),
    *("label_accuracy", "accuracy", "train_accuracy", "membership_auc", "certified_rate", "epsilon"),
    *("noise_multiplier", "n_parameters", "n", "n_fixed", "n_shadow", "seed", "seconds"),
)


class _Column(NamedTuple):
    """A column of a factor's table; an optional one is shown where a value has it."""

    title: str
    text: Callable[[Point], str]
    optional: bool = False


def factor_table(study: FactorStudy, factor: FactorResult) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a factor: a row per value, those of the base marked."""
    columns = [
        _Column("MSE", lambda point: with_error("mse", point.mean("mse"), point.spread)),
        _Column("Over nearest other", lambda point: ABSENT if point.ratio is None else f"× {point.ratio:.2f}"),
        _Column("Mean image", lambda point: _score(point, "baseline_mean_image_mse", "mse")),
        _Column("Success rate", lambda point: percent(point.mean("success_rate"))),
        _Column("LPIPS", lambda point: _score(point, "lpips"), optional=True),
        _Column("KL", lambda point: _score(point, "kl"), optional=True),
        _Column("Certified", lambda point: percent(point.mean("certified_rate")), optional=True),
        _Column("Accuracy", lambda point: percent(point.mean("accuracy"))),
        _Column("on training images", lambda point: percent(point.mean("train_accuracy")), optional=True),
        _Column("Membership AUC", lambda point: short(point.mean("membership_auc"), 2), optional=True),
        _Column("Epsilon", lambda point: short(point.mean("epsilon"), 4), optional=True),
        _Column("Noise", lambda point: short(point.mean("noise_multiplier"), 4), optional=True),
        *(_Column(f"Bound, κ {kappa:g}", partial(_bound, index), True) for index, kappa in enumerate(study.kappas)),
        _Column("Paper", lambda point: format_printed("mse", point.paper), optional=True),
    ]
    points = factor.points
    shown = [
        column
        for column in columns
        if not column.optional or any(column.text(p) not in (ABSENT, MISSING) for _, p in points)
    ]
    rows = [
        [f"{words} (base)" if study.is_base(point) else words, *(column.text(point) for column in shown)]
        for words, point in points
    ]
    return [factor.axis.capitalize(), *(column.title for column in shown)], rows


def _score(point: Point, key: str, kind: str = "") -> str:
    value = point.mean(key)
    return ABSENT if value is None else format_score(kind or key, value)


def _bound(index: int, point: Point) -> str:
    return short(point.bounds[index]) if point.bounds else ABSENT


def csv_table(study: FactorStudy) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of all cells: one per factor, value and seed, the base first."""
    named = [("base", "", "", study.base)]
    for factor in study.factors:
        named += [(factor.name, line.name, point.label, point) for line in factor.lines for point in line.points]
    rows = [
        [
            *words,
            *map(cell.number, _COLUMNS),
            point.paper,
            cell.reason,
            str(cell.folder.path.relative_to(study.folder.path)),
        ]
        for *words, point in named
        for cell in point.cells
    ]
    return ["factor", "line", "value", *_COLUMNS, "paper_mse", "reason", "folder"], rows


_LEGEND = (
    "± is the standard error over the target images or, with several seeds, over the seeds. Over nearest other: the "
    "MSE divided by that of the image nearest to the target among all others; the paper calls an attack successful "
    "below 1. Success rate: the share of target images for which it is. Accuracy: of the released models."
)
#: Metrics of every target image that are compared with its squared error.
_OTHER_SCORES = ("ssim", "lpips", "kl", "loss")


def write_page(folder: Path) -> Path:
    """Write everything about a study into its folder, from its files alone; raises as `FactorStudy.read` does."""
    study = FactorStudy.read(folder)
    findings = study.findings()
    panels = [Panel("Findings", items=findings[1:]), *_base_panels(study)]
    for factor in study.factors:
        panels += _factor_panels(study, factor)
    if study.failed:
        panels.append(Panel("Cells without results", "The same command runs them again.", items=study.failed))
    write_text(study.folder.path / "factors.csv", csv_text(*csv_table(study)))
    facts = environment()
    page = Page(
        kind="Factors of reconstruction: one factor at a time",
        settings=study.settings,
        facts={**facts, "command": "python reconn.py run --config config.yaml --out FOLDER"},
        lead="".join(findings[:1]),
        panels=panels,
        files={
            "factors.csv": "every cell",
            "cells/": "a run folder with its own page for every cell",
            "figures/": "the plots",
            "config.yaml": "the settings",
        },
    )
    page.write(study.folder.report)
    write_metrics(study.folder, {**study.record(), **facts})
    return study.folder.report


def _base_panels(study: FactorStudy) -> list[Panel]:
    """The base's target images with the smallest and largest errors, and how the metrics of all of them agree."""
    if not study.base.known:
        return []
    cell = study.base.known[0]
    victims = read_victims(cell.folder.victims)
    scores = {name: [row.scores.get(name) for row in victims] for name in _OTHER_SCORES}
    scores["loss"] = [row.loss for row in victims]
    rows = []
    for name, values in scores.items():
        known = [value for value in values if value is not None]
        if len(known) == len(victims) > 1:
            words = "the attacker's own uncertainty" if name == "loss" else measure_of(name).name
            rows.append([words, correlation_in_words(rank_correlation(cell.errors, known))])
    return [
        Panel(
            "Base: target images with the smallest and largest errors",
            "Every factor below changes one setting of this base, whose MSE is "
            f"{format_score('mse', study.base.mean('mse'))}. Left the target images with the smallest errors, right "
            "those with the largest.",
            [Picture(extremes(cell), "Target images with the smallest and the largest errors", "base.png")],
            header=["Metric of a target image", "Rank correlation with its squared error"],
            rows=rows,
        )
    ]


def _factor_panels(study: FactorStudy, factor: FactorResult) -> list[Panel]:
    pictures = []
    if any(point.known for _, point in factor.points):
        write_bytes(study.folder.figures / f"{factor.name}.png", factor_curve(study, factor, "png"))
        description = f"Error of the attack by {factor.title}"
        pictures.append(Picture(factor_curve(study, factor), description, f"{factor.name}.svg"))
    if is_private(factor):
        description = "Bounds on the chance of reconstruction against epsilon"
        pictures.append(Picture(bound_curves(study, factor), description, f"{factor.name}_bounds.svg"))
    for number, gallery in enumerate(factor_galleries(factor)):
        name = f"{factor.name}_gallery{f'_{number}' if number else ''}.png"
        pictures.append(Picture(gallery, f"Target images and reconstructions by {factor.title}", name))
    header, rows = factor_table(study, factor)
    where = f"In the paper: {factor.source}." if factor.source else ""
    lead = " ".join(part for part in (factor.note, where) if part)
    note = _LEGEND if factor is study.factors[0] else ""
    return [Panel(factor.title, lead, pictures, header=header, rows=rows, note=note), *measured_panels(factor)]
