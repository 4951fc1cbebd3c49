"""The files that an evaluation leaves behind: the page, the table, the figures, and last of all the record."""

from __future__ import annotations

import base64
import io
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_recon.experiments.evaluate.judgement import Level, levels, pareto_front, verdicts
from lit_recon.experiments.evaluate.results import CellResult, Evaluation
from lit_recon.experiments.evaluate.tables import attack_tables, csv_text, equal_utility, other_tables
from lit_recon.io.files import write_bytes, write_text
from lit_recon.reporting.pages import Panel, render
from lit_recon.reporting.plots import image_grid
from lit_recon.reporting.provenance import environment, paper_of
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.settings import flatten
from lit_recon.reporting.wording import ABSENT, MISSING, format_score
from lit_recon.reporting.writing import Scalar, write_metrics


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


#: Images side by side.
_IMAGES = 8


def gallery_grids(evaluation: Evaluation) -> dict[str, bytes]:
    """One PNG per defense and batch size, by title: the targets, then a row per strength, from weak to strong.

    None where features are judged: attacks on them need not return images.
    """
    grids: dict[str, bytes] = {}
    if evaluation.metric.of_features:
        return grids
    for size in evaluation.batch_sizes:
        points = [level for level in levels(evaluation, size) if level.strongest is not None]
        records = {id(level): RunRecord.read(level.strongest.folder) for level in points if level.strongest}
        for name, title in evaluation.defenses.items():
            shown = [level for level in points if level.strength is None or level.defense == name]
            if any(level.defense == name for level in shown):
                grids[f"{title}, batch {size}"] = _grid(evaluation, [(level, records[id(level)]) for level in shown])
    return grids


def _grid(evaluation: Evaluation, rows: list[tuple[Level, RunRecord]]) -> bytes:
    shared = set.intersection(*({row.id for row in record.victims} for _, record in rows))
    ids = [row.id for row in rows[0][1].victims if row.id in shared][:_IMAGES]
    images = {"target": _of(rows[0][1], rows[0][1].targets, ids)}
    for level, record in rows:
        attack = evaluation.attack_title(level.strongest) if level.strongest else ""
        strength = "no defense" if level.strength is None else f"{level.strength:g}"
        images[f"{strength}: {level.metric.format(level.value)}, {attack}"] = _of(record, record.reconstructions, ids)
    return image_grid(images, columns=_IMAGES)


def _of(record: RunRecord, images: NDArray[np.float32], ids: list[int]) -> NDArray[np.float32]:
    """The rows of `images` that belong to the victims with these ids."""
    places = {row.id: index for index, row in enumerate(record.victims)}
    return images[[places[identity] for identity in ids]]


#: Colours that stay apart for the colour-blind (Okabe and Ito), and marks for those who print in grey.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b6470", "#8c6d1f")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_GREY = "#6b7280"


def scatter(evaluation: Evaluation, kind: str) -> bytes:
    """Accuracy lost against the figure of the strongest attack: a panel per batch size, a row per kind of server.

    Args:
        evaluation: with trainings; without them the panels are empty and say so.
        kind: `svg` or `png`.

    Returns:
        The picture's file.
    """
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    sizes = evaluation.batch_sizes
    servers = (False, True) if evaluation.has_both_servers else (False,)
    figure = Figure(figsize=(5.4 * len(sizes) + 0.3, 4.1 * len(servers) + 0.5), layout="constrained")
    panels = figure.subplots(len(servers), len(sizes), squeeze=False, sharex="col", sharey=True)
    measure = evaluation.metric.measure
    keeps = "lower" if measure.better == "↑" else "higher"
    for honest, row in zip(servers, panels, strict=True):
        for panel, size in zip(row, sizes, strict=True):
            _draw(panel, evaluation, size, honest)
        row[0].set_ylabel(f"{measure.name} of the strongest attack  ({keeps}: keeps more)")
    for panel in panels[-1]:
        panel.set_xlabel("accuracy lost, in points")
    handles, labels = panels[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    buffer = io.BytesIO()
    # without a date, and with fixed identities, the same evaluation gives the same file
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "lit_recon"}):
        figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
    return buffer.getvalue()


def _draw(panel: Any, evaluation: Evaluation, size: int, honest: bool) -> None:
    known = levels(evaluation, size, honest)
    points = [level for level in known if level.price is not None and level.value is not None]
    who = ", honest servers alone" if honest else ", any server" if evaluation.has_both_servers else ""
    panel.set_title(f"batch {size}{who}", fontsize=10)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    if not points:
        panel.text(0.5, 0.5, "no price was measured", ha="center", va="center", transform=panel.transAxes)
        return
    for level in points:
        if level.strength is None:
            panel.plot(*_place(level), marker="o", color="black", markersize=8, linestyle="", label="no defense")
    for index, (name, title) in enumerate(evaluation.defenses.items()):
        own = [level for level in points if level.defense == name]
        if not own:
            continue
        xs, ys = zip(*map(_place, own), strict=True)
        colour, mark = _COLOURS[index % len(_COLOURS)], _MARKS[index % len(_MARKS)]
        panel.plot(xs, ys, marker=mark, color=colour, markersize=6, linewidth=0.9, alpha=0.9, label=title)
        for level, x, y in zip(own, xs, ys, strict=True):
            panel.annotate(
                f"{level.strength:g}", (x, y), textcoords="offset points", xytext=(5, 4), fontsize=7, color=colour
            )
    front = pareto_front(points)
    xs, ys = zip(*map(_place, front), strict=True)
    panel.plot(
        xs, ys, drawstyle="steps-post", color=_GREY, linewidth=1.2, linestyle="--", label="Pareto front", zorder=0
    )
    baseline = next((level.baseline for level in points if level.baseline is not None), None)
    if baseline is not None:
        panel.axhline(baseline, color=_GREY, linewidth=1, linestyle=":", label="nearest public image", zorder=0)


def _place(level: Level) -> tuple[float, float]:
    """Position of a level that has both figures."""
    return 100 * (level.price or 0.0), level.value or 0.0


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
        metric=evaluation.metric,
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
    write_text(grid.report, page)
    counts = {"n_failed": len(failed), "n_not_applicable": sum(not cell.applicable for cell in evaluation.cells)}
    write_metrics(grid, {**_record(evaluation), **counts, **facts})
    return grid.report


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


def _record(evaluation: Evaluation) -> dict[str, Scalar]:
    """The figures under flat keys."""
    record: dict[str, Scalar] = {"n_cells": len(evaluation.cells), "metric": evaluation.metric.key}
    for cell in evaluation.cells:
        if cell.kind == "generator":
            continue
        key = ".".join(cell.folder.name.split("-")[:-1])
        if cell.kind == "utility":
            record |= {f"accuracy.{key}": cell.number("accuracy")}
            record |= {f"final_train_loss.{key}": cell.number("final_train_loss")}
        else:
            record[f"{evaluation.metric.key}.{key}"] = cell.number(evaluation.metric.key)
            if cell.bound:
                record[f"bound_rmse.{key}"] = cell.bound.get("rmse")
                record |= {f"bound_rmse.{key}_reason": cell.bound["reason"]} if "reason" in cell.bound else {}
        if cell.reason:
            what = evaluation.metric.key if cell.kind == "attack" else "accuracy"
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
