"""The files that a study of factors leaves behind: the page, the table, the drawings, and last of all the record."""

from __future__ import annotations

from pathlib import Path

from lit_recon.reporting.atomic import write_bytes, write_text
from lit_recon.reporting.factors.curves import bound_curves, factor_curve, is_private
from lit_recon.reporting.factors.diagnostics import measured_panels, rank_correlation
from lit_recon.reporting.factors.galleries import extremes, factor_galleries
from lit_recon.reporting.factors.results import FactorResult, FactorStudy
from lit_recon.reporting.factors.tables import csv_text, factor_table
from lit_recon.reporting.formats import format_score, measure_of
from lit_recon.reporting.html import render
from lit_recon.reporting.panels import Panel, picture
from lit_recon.reporting.paper import paper_of
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.reading import read_victims
from lit_recon.reporting.settings import flatten
from lit_recon.reporting.writing import write_metrics

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
    run = study.folder.run
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
