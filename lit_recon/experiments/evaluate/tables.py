"""An evaluation as tables: panels of its page, the strongest attack of every row marked, and rows of a CSV file."""

from __future__ import annotations

from lit_recon.experiments.evaluate.judgement import NO_DEFENSE, Level, best_within, levels, strongest
from lit_recon.experiments.evaluate.results import CellResult, Evaluation
from lit_recon.measures import Measure
from lit_recon.reporting.pages import Panel, TableCell
from lit_recon.reporting.wording import ABSENT, MISSING, format_printed, format_score, measure_of, percent, short

#: Further columns of the CSV file, and the keys of their values in an attack's record.
_COLUMNS = {
    "n_batches": "n_batches",
    "rmse_std": "rmse_std",
    "nearest_public_rmse": "baseline_nearest_public_rmse",
    "mean_image_rmse": "baseline_mean_image_rmse",
    "seconds": "seconds",
}


def equal_utility(evaluation: Evaluation) -> list[Panel]:
    """Defenses at equal loss of accuracy, by batch size and kind of server; none where no loss was measured."""
    if not any(cell.kind == "utility" for cell in evaluation.cells):
        return []
    panels = []
    for size in evaluation.batch_sizes:
        for honest, server in evaluation.servers.items():
            points, rows = levels(evaluation, size, honest), list[list[str | TableCell]]()
            for budget in evaluation.max_accuracy_drops:
                best = best_within(points, budget)
                top = max(best.values(), key=lambda level: level.distance or 0.0, default=None)
                entries = [_protection(best.get(name), top) for name in (NO_DEFENSE, *evaluation.defenses)]
                rows.append([f"≤ {short(100 * budget, 6)}", *entries])
            panels.append(
                Panel(
                    f"At equal utility, batch size {size}{server}",
                    f"{evaluation.metric.measure.name} of the strongest attack where a defense may cost at most so "
                    "many percentage points of accuracy, at the strength of the grid that protects best within that "
                    "limit; the best defense of each row is highlighted. ± is the standard error of the mean, with "
                    "batches as clusters; from a single batch it is unknown.",
                    header=["Points", "no defense", *evaluation.defenses.values()],
                    rows=rows,
                )
            )
    return panels


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
    header += ["bound_rmse", "unbiased_bound_rmse", "bound_reason", "folder", "applicable", "reason"]
    winners, honest = (
        {id(level.strongest) for size in evaluation.batch_sizes for level in levels(evaluation, size, only)}
        for only in (False, True)
    )
    rows: list[list[object]] = []
    for cell in evaluation.attacked:
        level = (cell.defense, cell.strength)
        utility = [evaluation.utility(*level, key) for key in ("accuracy", "final_train_loss")]
        place = cell.folder.relative_to(evaluation.folder.path).as_posix()
        aware = None if cell.aware is None else str(cell.aware).lower()
        identity = [*level, cell.attack, aware, cell.batch_size]
        scores = [cell.number(key) for key in measured.values()]
        judged = [cell.paper, cell.error("rmse"), *(str(id(cell) in chosen).lower() for chosen in (winners, honest))]
        bound = [cell.bound.get("rmse"), cell.bound.get("unbiased_rmse"), cell.bound_reason]
        applicable = str(cell.applicable).lower()
        rows.append([*identity, *scores, *judged, *utility, *bound, place, applicable, cell.reason])
    return header, rows


def _table(evaluation: Evaluation, size: int, key: str) -> Panel:
    judged, measure = key == evaluation.metric.key, evaluation.measures.get(key) or measure_of(key)
    cells = [cell for cell in evaluation.attacked if cell.batch_size == size]
    columns = list(dict.fromkeys((cell.attack, cell.aware is False) for cell in cells))
    found = {(cell.defense, cell.strength, cell.attack, cell.aware is False): cell for cell in cells}
    titles = {key: evaluation.attack_title(cell) for cell in cells for key in [(cell.attack, cell.aware is False)]}
    rows = list[list[str | TableCell]]()
    for level, honest in zip(levels(evaluation, size), levels(evaluation, size, honest=True), strict=True):
        entries = [
            _entry(found.get((level.defense, level.strength, *column)), level, honest, measure, unknown=column[1])
            for column in columns
        ]
        stops = MISSING if level.stops is None else "✓" if level.stops else "✗"
        accuracy = MISSING if level.accuracy is None else percent(level.accuracy, 1)
        loss = evaluation.utility(level.defense, level.strength, "final_train_loss")
        price = MISSING if level.price is None else ABSENT if level.strength is None else f"{100 * level.price:+.1f}"
        rows.append(
            [
                level.title,
                *entries,
                *([accuracy, price, MISSING if loss is None else short(loss, 4), stops] if judged else []),
            ]
        )
    best = strongest(cells, evaluation.metric)
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


def _protection(level: Level | None, top: Level | None) -> TableCell:
    if level is None:
        return TableCell(ABSENT, mark="missing", reason="no strength of the grid costs so little, or none was attacked")
    error = level.standard_error
    small = [] if error is None else [f"± {format_score(level.metric.measure, error, unit=False)}"]
    small += [] if level.strength is None else [f"at {level.strength:g}"]
    return TableCell(level.metric.format(level.value), small, "ours" if level is top else "")


def _entry(cell: CellResult | None, level: Level, honest: Level, measure: Measure, unknown: bool) -> TableCell:
    if cell is None:
        why = "without a defense there is nothing to know" if unknown and level.strength is None else "not in the grid"
        return TableCell(ABSENT, mark="missing", reason=why)
    if not cell.applicable:
        return TableCell("not applicable", mark="missing", reason=cell.reason)
    printed = cell.paper if measure.key == level.metric.key else None
    paper = [] if printed is None else [f"paper {format_printed(measure, printed)}"]
    value, error = cell.number(measure.key), cell.error(measure.key)
    if value is None:
        return TableCell(MISSING, paper, "missing", cell.reason or "the run did not measure it")
    small = [] if error is None else [f"± {format_score(measure, error, unit=False)}"]
    mark = "ours" if cell is level.strongest else "rival" if cell is honest.strongest else ""
    return TableCell(format_score(measure, value), [*small, *paper], mark)
