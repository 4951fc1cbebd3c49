"""The tables of a report: a run beside its baselines and its paper, and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lit_recon.measures import Measure
from lit_recon.reporting.provenance import paper_of
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.wording import ABSENT, MISSING, duration, format_printed, format_score, measure_of

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
    "processes": "Processes",
    "seed": "Seed",
    "device": "Device",
    "cpu_count": "CPU cores",
    "platform": "System",
}


@dataclass(frozen=True)
class SummaryRow:
    """One metric of a run as text; `reasons` says of every missing value, ours first, why it is missing.

    `spread` is the standard deviation over images, `interval` the 95 % confidence interval of the mean.
    """

    measure: Measure
    ours: str
    spread: str
    interval: str
    mean_image: str
    nearest_public: str
    paper: str
    reasons: list[str]


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
    longest = max(bar.length for bar in bars) or 1.0
    return [Bar(bar.name, bar.text, bar.length / longest, bar.ours) for bar in sorted(bars, key=lambda bar: bar.length)]


def facts(record: RunRecord) -> list[tuple[str, str]]:
    """Cost, machine and versions as `(name, text)`; facts that the run did not record are left out."""
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
    if low is None or high is None:
        return ""
    values = (row.scores.get(measure.key) for row in record.victims)
    if measure.higher_is_better is False and all(value is None or value >= 0 for value in values):
        low = max(low, 0.0)  # with few batches the symmetric interval of an error may begin below zero
    return f"{format_score(measure, low, unit=False)} to {format_score(measure, high, unit=False)}"


def _reason(record: RunRecord, key: str) -> str:
    return record.text(f"{key}_reason") or "this run did not measure it"
