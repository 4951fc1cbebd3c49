"""The files that an evaluation leaves behind: the page, the table, the figures, and last of all the record."""

from __future__ import annotations

import base64
from pathlib import Path

from lit_recon.reporting.atomic import write_bytes, write_text
from lit_recon.reporting.evaluation.bounds import bound_panels
from lit_recon.reporting.evaluation.galleries import gallery_grids
from lit_recon.reporting.evaluation.judgement import levels
from lit_recon.reporting.evaluation.results import CellResult, Evaluation
from lit_recon.reporting.evaluation.scatter import scatter
from lit_recon.reporting.evaluation.tables import attack_tables, csv_text, equal_utility, other_tables
from lit_recon.reporting.evaluation.verdicts import verdicts
from lit_recon.reporting.formats import ABSENT, MISSING
from lit_recon.reporting.html import render
from lit_recon.reporting.paper import paper_of
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.rows import Metric
from lit_recon.reporting.settings import flatten
from lit_recon.reporting.writing import write_metrics


def build_evaluation(folder: Path | str) -> Path:
    """Write everything about an evaluation into its folder, from the files of its cells alone.

    Returns:
        The page's path.

    Raises:
        MissingDataError: the folder holds no evaluation.
        CorruptFileError: one of its files, or of its cells' files, is malformed.
    """
    evaluation = Evaluation.read(folder)
    grid = evaluation.folder
    picture, galleries = scatter(evaluation, "svg"), gallery_grids(evaluation)
    write_bytes(grid.figures / "scatter.svg", picture)
    write_bytes(grid.figures / "scatter.png", scatter(evaluation, "png"))
    for title, png in galleries.items():
        write_bytes(grid.figures / f"gallery_{_file_name(title)}.png", png)
    write_text(grid.table, csv_text(evaluation))
    failed = [cell for cell in evaluation.cells if cell.reason and cell.applicable]
    facts = environment()
    page = render(
        "evaluation.html.j2",
        name=str(evaluation.settings.get("name") or grid.path.resolve().name),
        paper=paper_of(evaluation.settings),
        figure=evaluation.figure,
        both_servers=evaluation.has_both_servers,
        elsewhere=[evaluation.attacks.get(name, name) for name in evaluation.networks],
        tables=attack_tables(evaluation),
        others=other_tables(evaluation),
        verdicts=verdicts(evaluation),
        panels=bound_panels(evaluation),
        equal=equal_utility(evaluation),
        scatter=_data_uri(picture, "svg+xml"),
        galleries={title: _data_uri(png, "png") for title, png in galleries.items()},
        inapplicable=not_applicable(evaluation),
        failed=[(evaluation.cell_title(cell), cell.reason) for cell in failed],
        settings=flatten(evaluation.settings),
        created=str(facts.get("created") or ""),
        version=str(facts.get("version_lit_recon") or ""),
        missing=MISSING,
        absent=ABSENT,
    )
    write_text(grid.run.report, page)
    counts = {"n_failed": len(failed), "n_not_applicable": sum(not cell.applicable for cell in evaluation.cells)}
    write_metrics(grid.run, {**_record(evaluation), **counts, **facts})
    return grid.run.report


def summary_lines(evaluation: Evaluation) -> list[str]:
    """The verdicts, for a terminal, and what is missing."""
    lines = [f"{title}: {sentence}" for title, sentences in verdicts(evaluation) for sentence in sentences]
    failed = sum(1 for cell in evaluation.cells if cell.reason and cell.applicable)
    lines += [f"not applicable: {title}: {reason}" for title, reason in not_applicable(evaluation)]
    return [*lines, *([f"{failed} cells have no figures; the report says why"] if failed else [])]


def not_applicable(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Attacks that cannot work on the grid's network, clients or batches, by title and reason."""
    cells: dict[tuple[str, str], list[CellResult]] = {}
    for cell in evaluation.attacked:
        if not cell.applicable:
            cells.setdefault((evaluation.attack_title(cell), cell.reason), []).append(cell)
    found = []
    for (title, reason), same in cells.items():
        sizes = list(dict.fromkeys(cell.batch_size for cell in same))
        rows = list(dict.fromkeys(evaluation.title(cell.defense, cell.strength) for cell in same))
        under = "" if len(rows) == len(evaluation.levels) else f", under {', '.join(rows)}"
        found.append((f"{title}, batch {' and '.join(map(str, sizes))}{under}", reason))
    return found


def _record(evaluation: Evaluation) -> dict[str, Metric]:
    """The figures under flat keys."""
    record: dict[str, Metric] = {"n_cells": len(evaluation.cells), "figure": evaluation.figure.key}
    for cell in evaluation.cells:
        if cell.kind == "generator":
            continue
        key = ".".join(cell.folder.name.split("-")[:-1])
        if cell.kind == "utility":
            record |= {f"accuracy.{key}": cell.number("accuracy")}
            record |= {f"final_train_loss.{key}": cell.number("final_train_loss")}
        else:
            record[f"{evaluation.figure.key}.{key}"] = cell.number(evaluation.figure.key)
            if cell.bound:
                record[f"bound_rmse.{key}"] = cell.bound.get("rmse")
                record |= {f"bound_rmse.{key}_reason": cell.bound["reason"]} if "reason" in cell.bound else {}
        if cell.reason:
            what = evaluation.figure.key if cell.kind == "attack" else "accuracy"
            record[f"{what}.{key}_reason"] = cell.reason
    for suffix, honest in (("", False), *((("_honest", True),) if evaluation.has_both_servers else ())):
        for size in evaluation.batch_sizes:
            for level in levels(evaluation, size, honest):
                name = level.defense if level.strength is None else f"{level.defense}_{level.strength:g}"
                winner = level.strongest.attack if level.strongest else None
                record[f"strongest{suffix}.{name}.b{size}"] = winner
                record[f"stops{suffix}.{name}.b{size}"] = level.stops
    return record


def _file_name(title: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in title.lower())


def _data_uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"
