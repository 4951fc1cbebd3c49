"""An evaluation as tables: panels of its page, the strongest attack of every row marked, and rows of a CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_recon.experiments.evaluate.comparison import DefenseComparison
from lit_recon.experiments.evaluate.conclusion import GridNames, conclude, missing
from lit_recon.experiments.evaluate.equal_utility import Protection, compare, strengths_of
from lit_recon.experiments.evaluate.judgement import Level, levels, strongest
from lit_recon.experiments.evaluate.results import CellResult, Evaluation, LeakageMetric
from lit_recon.measures import Measure
from lit_recon.reporting.pages import Panel, TableCell
from lit_recon.reporting.wording import (
    ABSENT,
    MISSING,
    format_interval,
    format_printed,
    format_score,
    measure_of,
    percent,
    short,
    strength_in_words,
)

#: Further columns of the CSV file, and the keys of their values in an attack's record.
_COLUMNS = {
    "n_batches": "n_batches",
    "rmse_std": "rmse_std",
    "nearest_public_rmse": "baseline_nearest_public_rmse",
    "mean_image_rmse": "baseline_mean_image_rmse",
    "seconds": "seconds",
}


def comparisons(evaluation: Evaluation) -> list[DefenseComparison]:
    """The comparison for every batch size and side for which losses of accuracy and attacks are known."""
    trainings, batches = rows_of(*utility_table(evaluation)), rows_of(*batch_table(evaluation))
    sign = -1 if evaluation.metric.measure.higher_is_better else 1
    found = []
    for size in evaluation.batch_sizes:
        same = [row for row in batches if row["batch_size"] == size and row["attack"] not in evaluation.networks]
        by_batch = evaluation.metric.key == "rmse"  # of other metrics only the mean over all images is known
        guess = {row["batch"] if by_batch else 0: row["mean_image"] for row in same if "mean_image" in row}
        for side in evaluation.sides:
            chosen = [row for row in same if row["attack"] not in side.barred]
            own = levels(evaluation, size, side.barred)
            stopped = [(level.defense, level.strength) for level in own if level.none_applies]
            defenses = strengths_of(evaluation.strengths, trainings, chosen, sign, stopped, [*guess.values()])
            known = {name: points for name, points in defenses.items() if len(points) > 1 and points[0].value is None}
            if known and (limits := evaluation.max_accuracy_drops):
                plain = next(iter(known.values()))[0].strongest
                futile = own[0].strength is None and bool(own[0].stops)  # attacks that fail without a defense
                lines = {limit: compare(known, limit) for limit in limits}
                found.append(DefenseComparison(size, side, lines, plain, futile))
    return found


def equal_utility(evaluation: Evaluation, compared: Sequence[DefenseComparison]) -> list[Panel]:
    """Defenses at equal cost, by batch size and side."""
    return [_equal_panel(evaluation, one) for one in compared]


def conclusions(evaluation: Evaluation, compared: Sequence[DefenseComparison]) -> list[tuple[str, list[str]]]:
    """By batch size, which defense is best at which cost, and what is not measured, in sentences."""
    attacks = {name: title for name, title in evaluation.attacks.items() if name not in evaluation.networks}
    metric = evaluation.metric
    names = GridNames(
        evaluation.defenses,
        attacks,
        evaluation.strengths,
        metric.measure.name,
        lambda value: metric.format(metric.distance(value)),
    )
    cells, planned = rows_of(*csv_table(evaluation)), any(cell.kind == "utility" for cell in evaluation.cells)
    trainings = rows_of(*utility_table(evaluation)) if planned else None
    found = []
    for size in evaluation.batch_sizes:
        own = [cell for cell in cells if cell["batch_size"] == size]
        said = [
            conclude(names, one, bool(missing(names, trainings, own, one.side.barred)))
            for one in compared
            if one.batch_size == size
        ]
        said += [*missing(names, trainings, own), *_without_accuracy(evaluation)]
        found += [(f"Batch size {size}", said)] if said else []
    return found


def _without_accuracy(evaluation: Evaluation) -> list[str]:
    """A sentence that names strengths of whose trainings some have no accuracy, such as diverged ones."""
    parts = []
    for level in evaluation.levels:
        own = evaluation.trainings(*level)
        known = sum(cell.number("accuracy") is not None for cell in own)
        if 0 < known < len(own):
            parts.append(f"{evaluation.title(*level)} ({len(own) - known} of {len(own)})")
    return [f"Trainings without an accuracy: {'; '.join(parts)}."] if parts else []


def _interval(metric: LeakageMetric, own: Protection) -> str:
    """The interval as text, within the limits of the metric; empty where none is known."""
    if own.interval is None:
        return ""
    low, high = sorted(map(metric.distance, own.interval))
    return format_interval(metric.measure, low, high, [metric.distance(own.value)])


def _equal_panel(evaluation: Evaluation, compared: DefenseComparison) -> Panel:
    names = list(next(iter(compared.found.values())))
    rows = list[list[str | TableCell]]()
    for limit, found in compared.found.items():
        top = max(found.values(), key=lambda one: one.value, default=None)
        rows.append([f"≤ {short(100 * limit, 6)}", *(_protection(evaluation, found[name], top) for name in names)])
    return Panel(
        f"At equal utility, batch size {compared.batch_size}{compared.side.words}",
        f"{evaluation.metric.measure.name} of the strongest attack where a defense may cost at most so many percentage "
        "points of accuracy, between the strengths of the grid by straight lines from no defense on; the best defense "
        "of each row is highlighted. Below it the interval that holds 90 % of the draws of batches and of seeds, the "
        "strengths, and the share of draws in which the defense is the best. > stands where the largest strength of "
        "the grid costs less."
        f"{_unknown(evaluation, compared)}",
        header=["Points", *(evaluation.defenses[name] for name in names)],
        rows=rows,
    )


def _unknown(evaluation: Evaluation, compared: DefenseComparison) -> str:
    """What the values and their intervals do not contain."""
    left, size = list[str](), compared.batch_size
    if not any(len(evaluation.losses(*level)) > 1 for level in evaluation.levels if level[1] is not None):
        left.append("each strength was trained once, so that the chance of training is not in the intervals")
    if any(cell.has_one_batch for cell in evaluation.attacked if cell.batch_size == size):
        left.append("from a single batch no interval is known")
    trained = [level for level in levels(evaluation, size, compared.side.barred) if level.strength is not None]
    futile = [level for level in trained if level.none_applies]
    remarks = {
        "left out, without an accuracy": [level for level in trained if level.cost is None],
        "left out, as no attack is applicable": [one for one in futile if one.guess is None],
        "no attack is applicable, so that the mean public image counts": [
            one for one in futile if one.guess is not None
        ],
        "without the results of some attacks": [level for level in trained if not level.complete],
    }
    left += [f"{said}: {', '.join(one.title for one in some)}" for said, some in remarks.items() if some]
    return "".join(f" {text[0].upper()}{text[1:]}." for text in left)


def rows_of(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """The rows of a table as mappings; missing values are left out."""
    found = [dict(zip(header, row, strict=True)) for row in rows]
    return [{key: value for key, value in row.items() if value is not None} for row in found]


def utility_table(evaluation: Evaluation) -> tuple[list[str], list[list[object]]]:
    """Header and rows, one per finished training that measures utility."""
    header = ["defense", "strength", "repetition", "accuracy", "final_train_loss", "seconds"]
    cells = [cell for cell in evaluation.cells if cell.kind == "utility" and cell.number("accuracy") is not None]
    return header, [
        [cell.defense, cell.strength, cell.repetition, *(cell.number(key) for key in header[3:])] for cell in cells
    ]


def batch_table(evaluation: Evaluation) -> tuple[list[str], list[list[object]]]:
    """Header and rows, one per attacked batch, with the mean over its images of the metric that ranks attacks.

    Beside it stands that of the mean public image; for metrics other than RMSE its mean over all images.
    """
    key = evaluation.metric.key
    rows: list[list[object]] = []
    for cell in evaluation.attacked:
        if (mean := cell.number(key)) is not None:
            identity = [cell.defense, cell.strength, cell.attack, _aware(cell), cell.batch_size]
            guesses = cell.batches("mean_image_rmse") if key == "rmse" else {}
            guess = cell.number(f"baseline_mean_image_{key}")
            for batch, value in (cell.batches(key) or {0: mean}).items():
                rows.append([*identity, batch, value, guesses.get(batch, guess)])
    return ["defense", "strength", "attack", "aware", "batch_size", "batch", "value", "mean_image"], rows


def _aware(cell: CellResult) -> str | None:
    return None if cell.aware is None else str(cell.aware).lower()


def attack_tables(evaluation: Evaluation, key: str | None = None) -> list[Panel]:
    """A table per batch size of a metric, if it has values; default: of the ranking metric, with the utilities."""
    key = key or evaluation.metric.key
    if all(cell.number(key) is None for cell in evaluation.attacked):
        return []
    return [_table(evaluation, size, key) for size in evaluation.batch_sizes]


def other_tables(evaluation: Evaluation) -> list[Panel]:
    """The tables of all other metrics; none of images where attacks are compared by a metric of features."""
    cells, metric = evaluation.attacked, evaluation.metric
    keys = [key for key in evaluation.measures if key != metric.key]
    if metric.of_features:
        keys = [key for key in keys if not any(f"baseline_nearest_public_{key}" in cell.metrics for cell in cells)]
    return [table for key in keys for table in attack_tables(evaluation, key)]


def csv_table(evaluation: Evaluation) -> tuple[list[str], list[list[object]]]:
    """Header and rows, one per attack, with the utility of its defense; None for missing values."""
    measured = {"n": "n", **{key: key for key in evaluation.measures}, **_COLUMNS}
    header = ["defense", "strength", "attack", "aware", "batch_size", *measured, "paper"]
    header += ["rmse_error", "strongest", "strongest_honest", "accuracy", "final_train_loss"]
    header += ["bound_rmse", "unbiased_bound_rmse", "bound_reason", "bound_notes", "folder", "applicable", "reason"]
    winners, honest = (
        {id(level.strongest) for size in evaluation.batch_sizes for level in levels(evaluation, size, barred)}
        for barred in ((), evaluation.malicious)
    )
    rows: list[list[object]] = []
    for cell in evaluation.attacked:
        level = (cell.defense, cell.strength)
        utility = [evaluation.utility(*level, key) for key in ("accuracy", "final_train_loss")]
        place = cell.folder.relative_to(evaluation.folder.path).as_posix()
        identity = [*level, cell.attack, _aware(cell), cell.batch_size]
        scores = [cell.number(key) for key in measured.values()]
        judged = [cell.paper, cell.error("rmse"), *(str(id(cell) in chosen).lower() for chosen in (winners, honest))]
        bound = [
            cell.bound.get("rmse"),
            cell.bound.get("unbiased_rmse"),
            cell.bound_reason,
            "; ".join(cell.bound_notes),
        ]
        applicable, reason = str(cell.applicable).lower(), _reason(cell, evaluation.metric.key)
        rows.append([*identity, *scores, *judged, *utility, *bound, place, applicable, reason])
    return header, rows


def _table(evaluation: Evaluation, size: int, key: str) -> Panel:
    judged, measure = key == evaluation.metric.key, evaluation.measures.get(key) or measure_of(key)
    cells = [cell for cell in evaluation.attacked if cell.batch_size == size]
    columns = list(dict.fromkeys(evaluation.column(cell) for cell in cells))
    found = {(cell.defense, cell.strength, *evaluation.column(cell)): cell for cell in cells}
    titles = {evaluation.column(cell): evaluation.attack_title(cell) for cell in cells}
    rows = list[list[str | TableCell]]()
    honest_levels = levels(evaluation, size, evaluation.malicious)
    for level, honest in zip(levels(evaluation, size), honest_levels, strict=True):
        entries = [
            _entry(found.get((level.defense, level.strength, *column)), level, honest, measure, unknown=column[1])
            for column in columns
        ]
        stops = MISSING if level.stops is None else "✓" if level.stops else "✗"
        row = (level.defense, level.strength)
        accuracy: str | TableCell = MISSING
        if level.accuracy is not None:
            spread = evaluation.utility_spread(*row, "accuracy")
            accuracy = TableCell(percent(level.accuracy, 1), [] if spread is None else [f"± {100 * spread:.1f}"])
        loss = evaluation.utility(*row, "final_train_loss")
        printed = next((str(cell.paper) for cell in evaluation.trainings(*row) if cell.paper is not None), None)
        end = TableCell(MISSING if loss is None else short(loss, 4), [] if printed is None else [f"paper {printed}"])
        cost = MISSING if level.cost is None else ABSENT if level.strength is None else f"{100 * level.cost:+.1f}"
        rows.append(
            [
                level.title,
                *entries,
                *([accuracy, cost, end, stops] if judged else []),
            ]
        )
    best = strongest(evaluation.compared(size), evaluation.metric)
    baselines = ", ".join(
        f"{words} {format_score(measure, value)}"
        for name, words in (("nearest_public", "nearest public image"), ("mean_image", "mean image"))
        if best is not None and (value := best.number(f"baseline_{name}_{key}")) is not None
    )
    utility = ["Accuracy ↑", "Points lost ↓", "Training loss ↓", "Stops"] if judged else []
    name = measure.name if judged else f"{measure.name} {measure.better}"
    aside = f" ({baselines})" if baselines and not judged else ""
    return Panel(
        f"{name}, batch size {size}{aside}",
        _explained(evaluation, baselines) if judged else "",
        header=["Defense", *(titles[column] for column in columns), *utility],
        rows=rows,
        folded=not judged,
    )


def _explained(evaluation: Evaluation, baselines: str) -> str:
    honest = ", in black the strongest one by an honest server if that is another" * evaluation.has_both_servers
    elsewhere = ", ".join(evaluation.attacks.get(name, name) for name in evaluation.networks)
    sentences = [
        "Mean ± its standard error, with batches as clusters; without ± it is unknown, as from a single batch.",
        f"The strongest attack of each row is highlighted{honest}.",
        f"For comparison: {baselines}." if baselines else "",
        "Stops: ✓ for defenses that stop every attack of the row." if evaluation.metric.baseline else "",
        f"Run on networks of their own, and therefore not compared: {elsewhere}." if elsewhere else "",
    ]
    return " ".join(filter(None, sentences))


def _protection(evaluation: Evaluation, own: Protection, top: Protection | None) -> TableCell:
    metric = evaluation.metric
    small = [interval] if (interval := _interval(metric, own)) else []
    small.append(f"at {strengths_in_words(own)}")
    if own.interval:
        small.append(f"best in {percent(own.best, 0)}")
    return TableCell(
        f"{'> ' * own.ends}{metric.format(metric.distance(own.value))}",
        small,
        "ours" if own is top and own.strengths != (None,) else "",
    )


def strengths_in_words(own: Protection) -> str:
    """The strengths that a protection is at, or between."""
    return " to ".join("no defense" if value is None else strength_in_words(value) for value in own.strengths)


def reason_of_absence(strength: float | None, unknown: bool) -> str:
    """Why the grid has no cell at a strength for an attack, which does not know the defense if that is `unknown`."""
    return "without a defense there is nothing to know" if unknown and strength is None else "not in the grid"


def _reason(cell: CellResult, key: str) -> str:
    """Why a cell lacks a metric; empty where it has it, or where nothing tells."""
    return cell.reason or ("" if cell.number(key) is not None else str(cell.metrics.get(f"{key}_reason") or ""))


def _entry(cell: CellResult | None, level: Level, honest: Level, measure: Measure, unknown: bool) -> TableCell:
    if cell is None:
        return TableCell(ABSENT, mark="missing", reason=reason_of_absence(level.strength, unknown))
    if not cell.applicable:
        return TableCell("not applicable", mark="missing", reason=cell.reason)
    printed = cell.paper if measure.key == level.metric.key else None
    paper = [] if printed is None else [f"paper {format_printed(measure, printed)}"]
    value, error = cell.number(measure.key), cell.error(measure.key)
    if value is None:
        return TableCell(MISSING, paper, "missing", _reason(cell, measure.key) or "the run did not measure it")
    small = [] if error is None else [f"± {format_score(measure, error, unit=False)}"]
    mark = "ours" if cell is level.strongest else "rival" if cell is honest.strongest else ""
    return TableCell(format_score(measure, value), [*small, *paper], mark)
