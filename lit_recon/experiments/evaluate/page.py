"""The files of an evaluation: the page, the table, the plots, and last the metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lit_recon.experiments.evaluate.comparison import DefenseComparison, Side
from lit_recon.experiments.evaluate.galleries import gallery_panels
from lit_recon.experiments.evaluate.judgement import Level, levels, pareto_front, verdicts
from lit_recon.experiments.evaluate.results import CellResult, Evaluation
from lit_recon.experiments.evaluate.tables import (
    attack_tables,
    batch_table,
    comparisons,
    conclusions,
    csv_table,
    equal_utility,
    other_tables,
    utility_table,
)
from lit_recon.experiments.update_attack.bound import WITHOUT_NOISE
from lit_recon.io.files import write_bytes, write_text
from lit_recon.reporting.pages import Page, Panel, Picture
from lit_recon.reporting.plots import COLOURS, MARKS, Plot, Series, draw
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.wording import MISSING, format_score, strength_in_words
from lit_recon.reporting.writing import Scalar, csv_text, write_metrics


def build_evaluation(folder: Path | str) -> Path:
    """Write everything about an evaluation into its folder, from the files of its cells alone; returns the page's path.

    A MissingDataError or CorruptFileError says that there is no evaluation, or one of the files is malformed.
    """
    evaluation = Evaluation.read(folder)
    return write_evaluation(evaluation, comparisons(evaluation), gallery_panels(evaluation))


def write_evaluation(evaluation: Evaluation, compared: Sequence[DefenseComparison], galleries: Sequence[Panel]) -> Path:
    """Write all about an evaluation, its defenses as compared and its galleries, into its folder; returns the page."""
    grid, facts = evaluation.folder, environment()
    write_bytes(grid.figures / "scatter.png", scatter(evaluation, "png"))
    for path, rows in ((grid.table, csv_table), (grid.batches, batch_table), (grid.trainings, utility_table)):
        write_text(path, csv_text(*rows(evaluation)))
    failed = [cell for cell in evaluation.cells if cell.reason and cell.applicable]
    inapplicable = not_applicable(evaluation)
    name = evaluation.metric.measure.name
    sections = [
        *bound_panels(evaluation),
        Panel(
            "Other metrics",
            f"Of the same reconstructions; the highlighted attack is the strongest by {name}.",
            parts=other_tables(evaluation),
        ),
        Panel(
            "Images",
            "The first target images above their reconstructions by every attack, from no defense to the largest "
            f"strength; below them {name}, the mean over all images of the cell, and which attack is the strongest. "
            "The images are chosen by their position, and are the same for all attacks and strengths.",
            parts=galleries,
        ),
        Panel(
            "Not applicable",
            "Attacks and trainings that cannot work with this network, these clients or such batches.",
            items=inapplicable,
        ),
        Panel("Cells without results", items=[(evaluation.cell_title(cell), cell.reason) for cell in failed]),
        Panel("Trainings without an accuracy", items=_without_accuracy(evaluation)),
    ]
    page = Page(
        kind="Evaluation of defenses",
        settings=evaluation.settings,
        facts={**facts, "command": "python attack.py evaluate --config config.yaml --out FOLDER"},
        lead=f"{_count(evaluation.defenses, 'defense')} against {_count(evaluation.attacks, 'attack')}, compared by "
        f"the {name} of the strongest attack.",
        panels=[
            _verdicts(evaluation, compared),
            _costs(evaluation, compared),
            *attack_tables(evaluation),
            *(panel for panel in sections if panel.rows or panel.items or panel.parts),
        ],
        files={
            "evaluation.csv": "all metrics",
            "batches.csv": "the metric that ranks attacks, batch by batch",
            "utility.csv": "accuracy and loss of every training",
            "cells/": "a run folder for every attack",
            "utility/": "the trainings",
            "figures/": "the plots, and the images of every defense",
            "config.yaml": "the settings",
        },
    )
    page.write(grid.report)
    counts = {"n_failed": len(failed), "n_not_applicable": sum(not cell.applicable for cell in evaluation.cells)}
    write_metrics(grid, {**_record(evaluation), **counts, **facts})
    return grid.report


def _count(named: Mapping[str, str], what: str) -> str:
    return f"{len(named)} {what}{'' if len(named) == 1 else 's'}"


def _verdicts(evaluation: Evaluation, compared: Sequence[DefenseComparison]) -> Panel:
    metric = evaluation.metric
    side = "below" if metric.measure.better == "↑" else "above"
    best = "recovers features best" if metric.of_features else "has the best reconstructions"
    sentences = [
        f"Defenses are compared by the strongest attack on each: the one that {best}.",
        f"A defense stops that attack if the mean {metric.measure.name} is {side} that of the nearest public image, "
        "which needs no attack."
        if metric.baseline
        else "",
        "Its cost is the loss of accuracy in training.",
        "A malicious server has modified the model before the clients received it, an honest but curious one has not: "
        "verdicts are for any server, then for honest ones only where that makes a difference."
        if evaluation.has_both_servers
        else "",
        "Some attackers know the BatchNorm statistics of the client's batch, which only clients that send them along "
        "give away: verdicts without these attackers follow where that makes a difference."
        if any(side.key == "no_statistics" for side in evaluation.sides)
        else "",
    ]
    heading = "At equal utility. " if compared else ""
    parts = [Panel(f"{heading}{title}", items=found) for title, found in conclusions(evaluation, compared)]
    parts += [Panel(title, items=found) for title, found in verdicts(evaluation)]
    return Panel("Verdicts", " ".join(filter(None, sentences)), parts=parts)


def _costs(evaluation: Evaluation, compared: Sequence[DefenseComparison]) -> Panel:
    measure = evaluation.metric.measure
    servers = " and choice of attacks" if len(evaluation.sides) > 1 else ""
    own = [
        f"Networks behind {evaluation.defenses[name]} are trained with {how}; the cost includes what that alone costs."
        for name, how in evaluation.own_trainings.items()
    ]
    values = [level.value for size in evaluation.batch_sizes for level in levels(evaluation, size)]
    endless = " Levels whose metric is infinite have no point." * (math.inf in map(abs, filter(None, values)))
    description = f"Accuracy lost against {measure.name} of the strongest attack, one plot per batch size{servers}"
    return Panel(
        "Cost and protection",
        "Each point is a defense at one strength, the number beside it. "
        f"{'Lower' if measure.better == '↑' else 'Higher'} points protect better, points on the left cost less; no "
        "other point is better in both respects than those on the dashed Pareto front. Bars are standard errors of the "
        "mean, with batches as clusters, and of trainings with several seeds; none where a single batch or training "
        f"leaves them unknown.{endless}",
        [Picture(scatter(evaluation, "svg"), description, "scatter.svg")],
        parts=equal_utility(evaluation, compared),
        note="\n".join(own),
    )


def bound_panels(evaluation: Evaluation) -> list[Panel]:
    """Lower bounds on the error of attacks; none where not requested."""
    asked = [cell for cell in evaluation.attacked if cell.bound]
    if not asked:
        return []
    notes = [f"{words} for {why}." for words in _REMARKS if (why := _remarked(evaluation, asked, words))]
    first = {clients for cell in asked if isinstance(clients := cell.bound.get("clients"), int)}
    notes += [f"From the information in the updates of the first {max(first)} clients alone."] if first else []
    used = ", and that an attack does not use information that is left out, as said below"
    less = used if any(cell.bound_notes for cell in asked) else ""
    return [
        Panel(
            "Lower bounds on the error",
            "Root mean squared error of a pixel, and two lower bounds from the Fisher information in the noisy update. "
            "Any attack (van Trees): holds for all attacks, on average over images from a normal distribution with the "
            "mean and covariance of the public images. Real images follow it only roughly, so that an attack that "
            "knows them better may come slightly below; and the bound is loose where some images are far more exposed "
            "than others, as the information is averaged. Unbiased attacks (Cramér-Rao): without any prior; ∞ where "
            "the update leaves a direction undetermined, so that an attack's smaller error comes from its prior. Both "
            f"assume that labels are known{less}.",
            header=["Cell", "Attack", "Any attack", "Unbiased attacks"],
            rows=[
                [evaluation.cell_title(cell), _root(cell), _bound(cell, "rmse"), _bound(cell, "unbiased_rmse")]
                for cell in asked
                if "rmse" in cell.bound
            ],
            note=" ".join(notes),
        )
    ]


#: Ways in which cells have no bound, and what is said of bounds.
_REMARKS = ("No bound above 0", "No bound", "Not computed", "About the bounds")


def _remarks(cell: CellResult) -> list[tuple[str, str]]:
    """Why a cell has no bound, or what its bounds leave out, each with the one of `_REMARKS` that it belongs to."""
    if "not_computed" in cell.bound:
        return [("Not computed", str(cell.bound["not_computed"]))]
    if reason := cell.bound.get("reason"):
        return [("No bound above 0" if reason == WITHOUT_NOISE else "No bound", str(reason))]
    return [("About the bounds", note) for note in cell.bound_notes]


def _remarked(evaluation: Evaluation, cells: Sequence[CellResult], words: str) -> str:
    """The defenses, or single cells of those whose cells differ, that this is said of, by reason or note."""
    said: dict[str, dict[str, None]] = {}
    for cell in cells:
        level = cell.defense, cell.strength
        for way, why in _remarks(cell):
            if way == words:
                alike = all((way, why) in _remarks(c) for c in cells if (c.defense, c.strength) == level)
                said.setdefault(why, {})[evaluation.title(*level) if alike else evaluation.cell_title(cell)] = None
    return "; ".join(f"{', '.join(titles)}: {why}" for why, titles in said.items())


def _root(cell: CellResult) -> str:
    """Root of the mean squared error, which the bounds are for; the mean of roots is smaller."""
    mse = cell.number("mse")
    return MISSING if mse is None else format_score("rmse", math.sqrt(mse))


def _bound(cell: CellResult, key: str) -> str:
    value = cell.bound.get(key)
    return format_score("rmse", value if isinstance(value, float) else math.inf)


def scatter(evaluation: Evaluation, kind: str) -> bytes:
    """Accuracy lost against the strongest attack's metric, as `svg` or `png`, by batch size and side."""
    sizes = evaluation.batch_sizes
    plots = [_cost_plot(evaluation, size, side) for side in evaluation.sides for size in sizes]
    return draw(plots, columns=len(sizes), size=(5.4, 4.4), kind=kind, shared_y=True)


def _cost_plot(evaluation: Evaluation, size: int, side: Side) -> Plot:
    points = [
        level
        for level in levels(evaluation, size, side.barred)
        if level.cost is not None and level.value is not None and math.isfinite(level.value)
    ]
    series = []
    for index, (name, title) in enumerate({"": "no defense", **evaluation.defenses}.items()):
        own = [level for level in points if (level.defense == name if name else level.strength is None)]
        if own:
            labels = [strength_in_words(level.strength) for level in own if level.strength is not None]
            colour, marker = (COLOURS[index % 8 - 1], MARKS[index % 8 - 1]) if name else ("black", "o")
            line = "-" if name else ""
            series.append(
                Series(title, *_places(own), line, marker, colour, 0.9, _bars(own), labels, x_errors=_cost_bars(own))
            )
    if points:
        xs, ys = _places(pareto_front(points))  # drawn as a line that rises at each point only
        series.append(Series("Pareto front", np.repeat(xs, 2)[1:].tolist(), np.repeat(ys, 2)[:-1].tolist(), "--"))
    baseline = next((level.baseline for level in points if level.baseline is not None), None)
    measure = evaluation.metric.measure
    better = "lower" if measure.better == "↑" else "higher"
    return Plot(
        f"batch size {size}{side.words}",
        x_label="accuracy lost, in percentage points",
        y_label=f"{measure.name} of the strongest attack ({better}: protects better)",
        series=series,
        levels={} if baseline is None else {"nearest public image": baseline},
        message="no cost in accuracy was measured",
    )


def _places(points: Sequence[Level]) -> tuple[list[float], list[float]]:
    """Accuracies lost, in percentage points, and metrics of levels that have both."""
    return [100 * (level.cost or 0.0) for level in points], [level.value or 0.0 for level in points]


def _cost_bars(points: Sequence[Level]) -> list[float]:
    """Standard errors of accuracies lost, in percentage points, NaN where one is not known; empty where none is."""
    errors = [level.cost_error for level in points]
    return [math.nan if e is None else 100 * e for e in errors] if any(e is not None for e in errors) else []


def _bars(points: Sequence[Level]) -> list[float]:
    """Standard errors of levels, NaN where one is not known; empty where none is."""
    errors = [level.standard_error for level in points]
    return [math.nan if error is None else error for error in errors] if any(e is not None for e in errors) else []


def summary_lines(evaluation: Evaluation, compared: Sequence[DefenseComparison]) -> list[str]:
    """The verdicts for a terminal, and what is missing."""
    found = [*conclusions(evaluation, compared), *verdicts(evaluation)]
    lines = [f"{title}: {sentence}" for title, sentences in found for sentence in sentences]
    failed = sum(1 for cell in evaluation.cells if cell.reason and cell.applicable)
    lines += [f"not applicable: {title}: {reason}" for title, reason in not_applicable(evaluation)]
    return [*lines, *([f"{failed} cells have no results; the report says why"] if failed else [])]


def not_applicable(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Titles and reasons of attacks and trainings that cannot work with the grid's network, clients or batches."""
    cells: dict[tuple[str, str, str], list[CellResult]] = {}
    for cell in evaluation.attacked:
        if not cell.applicable:
            cells.setdefault((evaluation.attack_title(cell), "", cell.reason), []).append(cell)
        elif refused := cell.number("n_refused"):
            of = f", for {refused:.0f} of {cell.number('n'):.0f} images, which the mean public image stands in for"
            cells.setdefault((evaluation.attack_title(cell), of, str(cell.metrics["refused_reason"])), []).append(cell)
    found = []
    for (title, of, reason), same in cells.items():
        sizes = list(dict.fromkeys(cell.batch_size for cell in same))
        rows = list(dict.fromkeys(evaluation.title(cell.defense, cell.strength) for cell in same))
        under = "" if len(rows) == len(evaluation.levels) else f", under {', '.join(rows)}"
        found.append((f"{title}, batch {' and '.join(map(str, sizes))}{under}{of}", reason))
    trainings: dict[str, dict[str, None]] = {}
    for cell in evaluation.cells:
        if cell.kind == "utility" and not cell.applicable:
            trainings.setdefault(cell.reason, {})[evaluation.title(cell.defense, cell.strength)] = None
    return [*found, *((f"training under {', '.join(rows)}", reason) for reason, rows in trainings.items())]


def _without_accuracy(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Titles and reasons of finished trainings that have no accuracy, such as those that diverged."""
    cells = [cell for cell in evaluation.cells if cell.kind == "utility" and cell.metrics and not cell.reason]
    reasons = [(cell, cell.metrics.get("accuracy_reason")) for cell in cells if cell.number("accuracy") is None]
    return [(evaluation.cell_title(cell), str(reason)) for cell, reason in reasons if reason]


def _record(evaluation: Evaluation) -> dict[str, Scalar]:
    key = evaluation.metric.key
    record: dict[str, Scalar] = {"n_cells": len(evaluation.cells), "metric": key}
    for cell in evaluation.cells:
        name = ".".join(cell.folder.name.split("-")[:-1])
        if cell.kind == "utility":
            for fact in ("accuracy", "final_train_loss"):
                record[f"{fact}.{name}"] = cell.number(fact)
                if record[f"{fact}.{name}"] is None and (why := cell.metrics.get(f"{fact}_reason")):
                    record[f"{fact}.{name}_reason"] = why
        elif cell.kind == "attack":
            value = record[f"{key}.{name}"] = cell.number(key)
            if value is not None and math.isinf(value):  # JSON has no such number
                record |= {f"{key}.{name}": None, f"{key}.{name}_reason": cell.metrics[f"{key}_reason"]}
            if cell.bound:
                record[f"bound_rmse.{name}"] = cell.bound.get("rmse")
            if cell.bound_reason:
                record[f"bound_rmse.{name}_reason"] = cell.bound_reason
        if cell.reason and cell.kind != "generator":
            record[f"{key if cell.kind == 'attack' else 'accuracy'}.{name}_reason"] = cell.reason
    for side in evaluation.sides:
        suffix = f"_{side.key}" if side.key else ""
        for size in evaluation.batch_sizes:
            for level in levels(evaluation, size, side.barred):
                place = f"{level.defense}.b{size}"
                if level.strength is not None:
                    place = f"{level.defense}_{strength_in_words(level.strength)}.b{size}"
                record[f"strongest{suffix}.{place}"] = level.strongest.attack if level.strongest else None
                record[f"stops{suffix}.{place}"] = level.stops
    return record
