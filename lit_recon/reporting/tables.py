"""The tables of a report: a run beside its baselines and its paper, and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lit_recon.measures import MEASURES, Measure
from lit_recon.reporting.images import data_uri
from lit_recon.reporting.provenance import paper_of
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.wording import (
    ABSENT,
    MISSING,
    closer_than_public,
    duration,
    format_interval,
    format_printed,
    format_score,
    measure_of,
)
from lit_recon.reporting.writing import VictimRow

#: Rows for a run that does not say what it measured.
_USUAL = ("rmse", "psnr", "ssim", "lpips", "label_accuracy")

_FACTS = {
    "seconds": "Time",
    "seconds_per_iteration": "Time per iteration",
    "peak_memory_mib": "Peak memory (MiB)",
    "peak_gpu_memory_mib": "Peak GPU memory (MiB)",
    "n_batches": "Batches",
    "model": "Model",
    "weights": "Weights of the model",
    "backbone": "Backbone",
    "backbone_epochs": "Backbone's epochs",
    "backbone_accuracy": "Backbone's test accuracy",
    "split_hash": "Hash of the split",
    "execution": "Execution",
    "together": "Victims computed together",
    "processes": "Processes",
    "seed": "Seed",
    "pool": "Pool of the target images",
    "device": "Device",
    "cpu_count": "CPU cores",
    "platform": "System",
}


@dataclass(frozen=True)
class SummaryRow:
    """One metric of a run, its baselines and its paper, as text."""

    measure: Measure
    ours: str
    spread: str  # standard deviation over images
    interval: str  # 95 % confidence interval of the mean
    mean_image: str
    nearest_public: str
    paper: str
    reasons: list[str]  # why each missing value is missing, ours first


@dataclass(frozen=True)
class Bar:
    """One bar of a chart: `length` is a share of the longest; `ours` marks the run itself."""

    name: str
    text: str
    length: float
    ours: bool = False


def summary_table(record: RunRecord) -> list[SummaryRow]:
    """The metrics that the run states, then others that it has with a spread, then those that only its paper has.

    MSE has a row only where the paper prints it: RMSE says the same.
    """
    printed = paper_of(record.settings).values
    known = [key.removesuffix("_std") for key in record.metrics if key.endswith("_std")]
    spread = [key for key in known if not key.startswith("baseline_")]  # those are columns
    keys = [key for key in (*(record.measures or _USUAL), *spread) if key != "mse"]
    return [_summary_row(record, key, printed) for key in dict.fromkeys((*keys, *printed))]


def rmse_bars(record: RunRecord) -> list[Bar]:
    """The run's RMSE beside that of its baselines and its paper, smallest first; nothing when the run has none."""
    ours, printed = record.number("rmse"), paper_of(record.settings).values.get("rmse")
    if ours is None:
        return []
    baselines = {
        "Nearest public image": record.number("baseline_nearest_public_rmse"),
        "Mean public image": record.number("baseline_mean_image_rmse"),
    }
    bars = [Bar("This run", format_score("rmse", ours), ours, ours=True)]
    if isinstance(printed, int | float):
        bars.append(Bar("Paper", format_printed("rmse", printed), printed))
    bars += [Bar(name, format_score("rmse", value), value) for name, value in baselines.items() if value is not None]
    bars.sort(key=lambda bar: bar.length)
    return [replace(bar, length=bar.length / (bars[-1].length or 1.0)) for bar in bars]


def facts(record: RunRecord) -> list[tuple[str, str]]:
    """Cost, machine and versions as `(name, text)`, as far as the run recorded them."""
    versions = {key: key.removeprefix("version_") for key in record.metrics if key.startswith("version_")}
    texts = {key: record.text(key) for key in (*_FACTS, *versions)}
    for key, value in record.metrics.items():
        if key in texts and isinstance(value, float):
            texts[key] = duration(value) if key.startswith("seconds") else f"{value:.4g}"
    return [(name, texts[key]) for key, name in (_FACTS | versions).items() if texts[key]]


def _summary_row(record: RunRecord, key: str, printed: Mapping[str, object]) -> SummaryRow:
    measure, value = measure_of(key, record), record.number(key)
    deviation = record.number(f"{key}_std") if value is not None and len(record.victims) > 1 else None
    reasons = [] if value is not None else [f"{measure.name} is {MISSING}: {_reason(record, key)}"]
    baselines = {}
    for name in ("mean_image", "nearest_public"):
        full = f"baseline_{name}_{key}"
        baselines[name] = format_score(measure, record.number(full)) if full in record.metrics else ABSENT
        if baselines[name] == MISSING:
            reasons.append(f"{measure.name} of the {name.replace('_', ' ')} is {MISSING}: {_reason(record, full)}")
    return SummaryRow(
        measure=measure,
        ours=format_score(measure, value),
        spread="" if deviation is None else format_score(measure, deviation, unit=False),
        interval=_interval(record, measure),
        **baselines,
        paper=format_printed(measure, printed.get(key)),
        reasons=reasons,
    )


def _interval(record: RunRecord, measure: Measure) -> str:
    low, high = (record.number(f"{measure.key}_{end}") for end in ("low", "high"))
    return format_interval(measure, low, high, (row.scores.get(measure.key) for row in record.victims))


def _reason(record: RunRecord, key: str) -> str:
    return record.text(f"{key}_reason") or "this run did not measure it"


#: From this many victims on, cards are small, and the best, median and worst are shown large before them.
_MANY = 25
_FEW = 3  # up to this many, cards are wide
_SMALL_SIDE = 64  # pixels
#: Metrics that cards do not list: RMSE stands below the images, and MSE says the same.
_NOT_LISTED = ("rmse", "mse")


@dataclass(frozen=True)
class Card:
    """One victim; images are data URIs."""

    title: str  # id and class of the image
    label_note: str  # the recovered label, where it is wrong
    closer: bool | None  # whether the reconstruction beats the nearest public image; None where that is not known
    certified: bool | None  # whether the attack certifies the reconstruction; None: it gives no certificate
    target: str
    reconstruction: str
    nearest_public: str  # empty without public images
    rmse: str
    nearest_rmse: str
    scores: list[tuple[str, str]]  # `(name, value)`, without the RMSE
    rank: str = ""  # `Best`, `Median`, `Worst`, or nothing


@dataclass(frozen=True)
class CardGroup:
    """The victims of one batch, or, untitled, of many batches of one image each."""

    title: str
    cards: list[Card]


@dataclass(frozen=True)
class Gallery:
    """All cards of a run."""

    groups: list[CardGroup]  # every victim once
    extremes: list[Card]  # the best, median and worst by RMSE, where there are too many victims to take in at once
    compact: bool  # whether the cards are small
    card_width: int  # least width in CSS pixels
    pixelated: bool  # whether images are so small that a page has to enlarge them
    public: bool  # whether the cards show public images


def gallery(record: RunRecord) -> Gallery:
    """The cards of all victims of a run."""
    closer = closer_than_public(record)
    batches: dict[int, list[int]] = {}
    for index, row in enumerate(record.victims):
        batches.setdefault(row.batch, []).append(index)
    if all(len(members) == 1 for members in batches.values()):
        groups = [CardGroup("", [_card(record, index, closer) for index in range(len(record.victims))])]
    else:
        groups = [
            CardGroup(
                f"Batch {batch} · loss {record.victims[members[0]].loss:.3g}",
                [_card(record, index, closer) for index in members],
            )
            for batch, members in sorted(batches.items())
        ]
    many, small = len(record.victims) >= _MANY, is_small(record)
    return Gallery(
        groups,
        [_card(record, index, closer, rank) for rank, index in _extremes(record.victims)] if many else [],
        compact=many,
        card_width=162 if many else 280 if small and len(record.victims) > _FEW else 380,
        pixelated=small,
        public=record.nearest_public is not None,
    )


def is_small(record: RunRecord) -> bool:
    """Whether the images of a run have so few pixels that a page enlarges them and should show each pixel."""
    side: int = max(record.targets.shape[2:])
    return side <= _SMALL_SIDE


def class_name(record: RunRecord, label: int) -> str:
    """The name of a class; its number, said to be one, where it has no other name."""
    name = record.class_names[label] if 0 <= label < len(record.class_names) else str(label)
    return f"class {name}" if name.isdecimal() else name


def _card(record: RunRecord, index: int, closer: Sequence[bool | None], rank: str = "") -> Card:
    row = record.victims[index]
    missed = record.text("label_accuracy_reason") or "label not recovered"
    label_note = "" if row.recovered_label == row.label else missed
    if label_note and row.recovered_label >= 0:
        label_note = f"label taken for {class_name(record, row.recovered_label)}"
    return Card(
        title=f"#{row.id} · {class_name(record, row.label)}",
        label_note=label_note,
        closer=closer[index],
        certified=row.certified,
        target=data_uri(record.targets[index]),
        reconstruction=data_uri(record.reconstructions[index]),
        nearest_public="" if record.nearest_public is None else data_uri(record.nearest_public[index]),
        rmse=format_score("rmse", row.scores.get("rmse")),
        nearest_rmse=format_score("rmse", row.scores.get("nearest_public_rmse")),
        scores=[
            (measure.name, format_score(measure, value, unit=False))
            for measure in (record.measures or MEASURES).values()
            # where a whole run lacks a score, the table says why
            if measure.key not in _NOT_LISTED and (value := row.scores.get(measure.key)) is not None
        ],
        rank=rank,
    )


def _extremes(victims: Sequence[VictimRow]) -> list[tuple[str, int]]:
    known = [(rmse, index) for index, row in enumerate(victims) if (rmse := row.scores.get("rmse")) is not None]
    order = [index for _, index in sorted(known)]
    return [("Best", order[0]), ("Median", order[len(order) // 2]), ("Worst", order[-1])] if order else []
