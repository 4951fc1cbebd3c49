"""An evaluation as tables: for the page, with the strongest attack of every row, and as rows of a CSV file."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

from lit_recon.experiments.evaluate.judgement import NO_DEFENSE, Level, best_within, levels, strongest
from lit_recon.experiments.evaluate.results import CellResult, Evaluation, LeakageMetric
from lit_recon.reporting.wording import ABSENT, MISSING, Measure, format_printed, format_score, measure_of

#: Figures of an attack's run that the CSV file holds, by column.
_FIGURES = {
    "n": "n",
    "rmse": "rmse",
    "rmse_std": "rmse_std",
    "psnr": "psnr",
    "ssim": "ssim",
    "lpips": "lpips",
    "feature_error": "feature_error",
    "feature_cosine": "feature_cosine",
    "label_accuracy": "label_accuracy",
    "nearest_public_rmse": "baseline_nearest_public_rmse",
    "mean_image_rmse": "baseline_mean_image_rmse",
    "seconds": "seconds",
}
#: Metrics with a table of their own, besides the one that attacks are judged by: of images, and of features.
_SHOWN = ("rmse", "psnr", "ssim", "lpips", "feature_error", "feature_cosine")
#: In place of the figure of an attack that cannot work there.
_NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Entry:
    """One cell of a table.

    Attributes:
        text: the mean.
        spread: standard deviation over the images.
        paper: what the paper prints.
        strongest: the closest attack of its row.
        strongest_honest: the closest of those whose server is honest.
        reason: why there is no figure.
    """

    text: str
    spread: str = ""
    paper: str = ABSENT
    strongest: bool = False
    reason: str = ""
    strongest_honest: bool = False


@dataclass(frozen=True)
class Row:
    """A defense at one strength: one entry per attack, its price, and the limit that it is held against."""

    title: str
    entries: list[Entry]
    accuracy: str
    price: str
    train_loss: str
    stops: bool | None


@dataclass(frozen=True)
class Table:
    """All defenses at one batch size in one metric; `baselines` says what guesses reach over the same images."""

    measure: Measure
    batch_size: int
    attacks: list[str]
    rows: list[Row]
    baselines: str


@dataclass(frozen=True)
class EqualUtility:
    """Defenses at equal price, at one batch size: by budget, one entry per defense, none of them first.

    The entry of the defense that protects best is marked as `strongest`.
    """

    batch_size: int
    honest: bool
    defenses: list[str]
    rows: list[tuple[str, list[Entry]]]


def equal_utility(evaluation: Evaluation) -> list[EqualUtility]:
    """One table per batch size, and another against honest servers alone; none where no price was measured."""
    if not any(cell.kind == "utility" for cell in evaluation.cells):
        return []
    names = [NO_DEFENSE, *evaluation.defenses]
    titles = ["no defense", *evaluation.defenses.values()]
    tables = []
    for size in evaluation.batch_sizes:
        for honest in (False, True) if evaluation.has_both_servers else (False,):
            points = levels(evaluation, size, honest)
            rows = []
            for budget in evaluation.max_accuracy_drops:
                best = best_within(points, budget)
                top = max(best.values(), key=lambda level: level.distance or 0.0, default=None)
                rows.append((f"{100 * budget:g}", [_protection(best.get(name), top) for name in names]))
            tables.append(EqualUtility(size, honest, titles, rows))
    return tables


def attack_tables(evaluation: Evaluation, key: str | None = None) -> list[Table]:
    """One table per batch size, of the metric under `key` (default: the evaluation's); none where no attack has it."""
    key = key or evaluation.metric.key
    if all(cell.number(key) is None for cell in evaluation.attacked):
        return []
    return [_table(evaluation, size, key) for size in evaluation.batch_sizes]


def other_tables(evaluation: Evaluation) -> list[Table]:
    """The same of all other metrics; where features are judged, of features alone."""
    keys = [key for key in _SHOWN if key != evaluation.metric.key]
    if evaluation.metric.of_features:
        keys = [key for key in keys if LeakageMetric(key).of_features]
    return [table for key in keys for table in attack_tables(evaluation, key)]


def csv_table(evaluation: Evaluation) -> tuple[list[str], list[list[object]]]:
    """Header and rows, one per attack, with the utility of its defense beside it; None where there is no figure."""
    header = ["defense", "strength", "attack", "aware", "batch_size", *_FIGURES, "paper"]
    header += ["strongest", "strongest_honest", "accuracy", "final_train_loss"]
    header += ["bound_rmse", "unbiased_bound_rmse", "bound_reason", "folder", "applicable", "reason"]
    winners, honest = (
        {id(level.strongest) for size in evaluation.batch_sizes for level in levels(evaluation, size, only)}
        for only in (False, True)
    )
    rows: list[list[object]] = []
    for cell in evaluation.attacked:
        training = evaluation.training(cell.defense, cell.strength)
        utility = [training.number(key) if training else None for key in ("accuracy", "final_train_loss")]
        place = cell.folder.relative_to(evaluation.folder.path).as_posix()
        aware = None if cell.aware is None else str(cell.aware).lower()
        identity = [cell.defense, cell.strength, cell.attack, aware, cell.batch_size]
        figures = [cell.number(key) for key in _FIGURES.values()]
        judged = [cell.paper, *(str(id(cell) in chosen).lower() for chosen in (winners, honest))]
        bound = [cell.bound.get(key) for key in ("rmse", "unbiased_rmse", "reason")]
        applicable = str(cell.applicable).lower()
        rows.append([*identity, *figures, *judged, *utility, *bound, place, applicable, cell.reason])
    return header, rows


def csv_text(evaluation: Evaluation) -> str:
    """The same as a file's content."""
    header, rows = csv_table(evaluation)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue()


def _table(evaluation: Evaluation, size: int, key: str) -> Table:
    cells = [cell for cell in evaluation.attacked if cell.batch_size == size]
    columns = list(dict.fromkeys((cell.attack, cell.aware is False) for cell in cells))
    found = {(cell.defense, cell.strength, cell.attack, cell.aware is False): cell for cell in cells}
    titles = {key: evaluation.attack_title(cell) for cell in cells for key in [(cell.attack, cell.aware is False)]}
    rows = []
    for level, honest in zip(levels(evaluation, size), levels(evaluation, size, honest=True), strict=True):
        entries = [
            _entry(found.get((level.defense, level.strength, *column)), level, honest, key, unknown=column[1])
            for column in columns
        ]
        rows.append(
            Row(level.title, entries, _percent(level.accuracy), _price(level), _number(level.train_loss), level.stops)
        )
    best = strongest(cells, evaluation.metric)
    baselines = [
        f"{words} {format_score(key, value)}"
        for name, words in (("nearest_public", "nearest public image"), ("mean_image", "mean image"))
        if best is not None and (value := best.number(f"baseline_{name}_{key}")) is not None
    ]
    return Table(measure_of(key), size, [titles[column] for column in columns], rows, ", ".join(baselines))


def _protection(level: Level | None, top: Level | None) -> Entry:
    if level is None:
        return Entry(ABSENT, reason="no strength of the grid costs so little, or none was attacked")
    strength = "" if level.strength is None else f"at {level.strength:g}"
    return Entry(level.metric.format(level.value), strength, strongest=level is top)


def _entry(cell: CellResult | None, level: Level, honest: Level, key: str, unknown: bool) -> Entry:
    if cell is None:
        why = "without a defense there is nothing to know" if unknown and level.strength is None else "not in the grid"
        return Entry(ABSENT, reason=why)
    if not cell.applicable:
        return Entry(_NOT_APPLICABLE, reason=cell.reason)
    paper = format_printed(key, cell.paper) if key == level.metric.key else ABSENT
    value, spread = cell.number(key), cell.number(f"{key}_std")
    if value is None:
        return Entry(MISSING, paper=paper, reason=cell.reason or "the run did not measure it")
    return Entry(
        format_score(key, value),
        "" if spread is None else format_score(key, spread, unit=False),
        paper,
        cell is level.strongest,
        strongest_honest=cell is honest.strongest,
    )


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def _price(level: Level) -> str:
    if level.price is None:
        return MISSING
    return ABSENT if level.strength is None else f"{100 * level.price:+.1f}"


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"
