"""The sentences and numbers of a page, built from the record and the settings of a run alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lit_recon.measures import MEASURES, Measure
from lit_recon.reporting.provenance import find_setting
from lit_recon.reporting.record import RunRecord

MISSING = "n/a"
#: Stands for a value or setting that the run does not have, as opposed to one that could not be computed.
ABSENT = "\N{EN DASH}"


def measure_of(key: str, record: RunRecord | None = None) -> Measure:
    """How to print the metric under `key`: as the run says, else as the package's own metrics are, else plainly."""
    stated = record.measures.get(key) if record is not None else None
    return stated or MEASURES.get(key) or Measure(key, key.replace("_", " ").capitalize())


def strength_in_words(value: float) -> str:
    """A strength, which no other has in the same words.

    >>> strength_in_words(0.1), strength_in_words(2.0), strength_in_words(0.12345678)
    ('0.1', '2', '0.12345678')
    """
    text = f"{value:g}"
    return text if float(text) == value else repr(value).removesuffix(".0")


def format_score(metric: str | Measure, value: float | None, unit: bool = True) -> str:
    r"""A value of a metric, or of the package's metric of that key; more decimals where it would round to zero.

    >>> format_score("rmse", 0.05149), format_score("rmse", 0.00213), format_score("psnr", 25.77)
    ('0.051', '0.0021', '25.8\xa0dB')
    """
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "∞" if value == math.inf else str(value)
    measure = metric if isinstance(metric, Measure) else measure_of(metric)
    shown = 100 * value if measure.unit == "%" else value
    text = f"{shown:.{measure.decimals}f}"
    if shown and abs(shown) < 10 ** (1 - measure.decimals):
        text = f"{shown:.2g}"
    return f"{text}\N{NO-BREAK SPACE}{measure.unit}" if unit and measure.unit else text


def format_interval(
    measure: Measure, low: float | None, high: float | None, values: Iterable[float | None] = ()
) -> str:
    """An interval of a metric's mean, within the limits of the metric; empty where an end is missing.

    An error of which none of the single `values` is negative has no mean below zero either.

    >>> format_interval(MEASURES["label_accuracy"], 0.13, 1.37), format_interval(MEASURES["psnr"], -1.0, 31.0)
    ('13 to 100', '-1.0 to 31.0')
    """
    if low is None or high is None:
        return ""
    least = -math.inf if measure.low is None else measure.low
    most = math.inf if measure.high is None else measure.high
    if measure.higher_is_better is False and all(value is None or value >= 0 for value in values):
        least = max(least, 0.0)
    # with few batches a symmetric interval may begin or end beyond them
    ends = (min(max(end, least), most) for end in (low, high))
    return " to ".join(format_score(measure, end, unit=False) for end in ends)


def format_printed(metric: str | Measure, value: object) -> str:
    """A paper's value with the digits that the paper prints, or the text that stands for it.

    >>> format_printed("rmse", 0.16), format_printed("rmse", "0.16 to 0.25"), format_printed("rmse", None)
    ('0.16', '0.16 to 0.25', '–')
    """
    if value is None:
        return ABSENT
    if not isinstance(value, int | float):
        return str(value)
    measure = metric if isinstance(metric, Measure) else measure_of(metric)
    if measure.unit == "%":
        return format_score(measure, value)
    return f"{value:g}\N{NO-BREAK SPACE}{measure.unit}".rstrip()


def short(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits, or all digits before the point.

    >>> short(0.12345), short(999.7), short(12345.6), short(1.5e7), short(math.inf), short(None)
    ('0.123', '1,000', '12,346', '1.5e+07', '∞', '–')
    """
    if value is None:
        return ABSENT
    if 10**digits - 0.5 <= abs(value) < 1e6:  # also what rounds up to the power of ten
        return f"{value:,.0f}"
    return "∞" if value == math.inf else f"{value:,.{digits}g}"


def percent(share: float | None, decimals: int = 0) -> str:
    r"""A share of 1 in percent.

    >>> percent(0.874), percent(0.874, 1), percent(None)
    ('87\xa0%', '87.4\xa0%', '–')
    """
    return ABSENT if share is None else f"{100 * share:.{decimals}f}\N{NO-BREAK SPACE}%"


def power_of_ten(log10: float) -> str:
    """A probability that may be smaller than the smallest float.

    >>> power_of_ten(-1.0), power_of_ten(-36.3)
    ('0.1', '10^-36.3')
    """
    return short(10**log10) if log10 > -4 else f"10^{log10:.1f}"


def with_error(key: str, value: float | None, error: float | None) -> str:
    """A metric's mean and standard error.

    >>> with_error("mse", 0.0123, 0.0045), with_error("mse", None, None)
    ('0.0123 ± 0.0045', 'n/a')
    """
    spread = "" if value is None or error is None else f" ± {format_score(key, error, unit=False)}"
    return f"{format_score(key, value)}{spread}"


def duration(seconds: float) -> str:
    """A duration in readable units.

    >>> duration(0.0123), duration(0.9997), duration(4.2), duration(42.4), duration(125), duration(7380)
    ('12.3 ms', '1.0 s', '4.2 s', '42 s', '2 min 5 s', '2 h 3 min')
    """
    if seconds < 0.9995:  # above, it is rounded to a second
        return f"{1000 * seconds:.3g} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


_SAME = 0.05  # relative difference below which two mean errors are called equal
_HUGE = 10_000  # ratio beyond which no number says more


class Grant(NamedTuple):
    """One thing that the attacker knew or did not know."""

    known: bool
    text: str


def closer_than_public(record: RunRecord) -> list[bool | None]:
    """For every victim: is the reconstruction nearer to the truth than the nearest public image? None: not known."""
    pairs = ((row.scores.get("rmse"), row.scores.get("nearest_public_rmse")) for row in record.victims)
    return [None if ours is None or public is None else ours < public for ours, public in pairs]


def verdict(record: RunRecord) -> str:
    """One sentence: how many images beat the nearest public one, and the mean error beside the mean image's."""
    sentence = "; ".join(filter(None, (_count(record), _error(record))))
    sentence = sentence or "this run has no metrics that could be summarized"
    return f"{sentence[0].upper()}{sentence[1:]}."


def knowledge(record: RunRecord) -> list[Grant]:
    """What the attacker knew and did not know."""
    sizes = sorted(set(Counter(row.batch for row in record.victims).values()))
    images = f"{' or '.join(map(str, sizes))} {'image' if sizes == [1] else 'images'}"
    model = "The public model: its architecture, its weights and how it normalizes pixels."
    if record.settings.get("server"):
        model = (
            "The model, which a malicious server modified before clients received it: results are not comparable with "
            "those of an attacker who does not modify the model."
        )
    return [
        Grant(True, model),
        Grant(True, f"The client's update, and that it came from {images}."),
        *_client(record),
        *_defense(record),
        _labels(record),
        *_batch_norm(record),
        Grant(False, "The images. They were used only after the attack, to match and score the reconstructions."),
    ]


def notes(record: RunRecord) -> list[str]:
    """The attack's notes for readers, each once."""
    found = record.metrics.get("notes")
    sentences = found if isinstance(found, list) else [record.text("notes")]
    return [sentence for sentence in dict.fromkeys(map(str, sentences)) if sentence]


def _count(record: RunRecord) -> str:
    judged = closer_than_public(record)
    if not judged or None in judged:
        return ""
    n, won = len(judged), judged.count(True)
    if n == 1:
        closer = "closer" if won else "no closer"
        return f"the reconstruction is {closer} to the truth than the nearest public image"
    who = f"all {n}" if won == n else f"none of the {n}" if not won else f"{won} of {n}"
    return f"{who} reconstructions are closer to the truth than the nearest public image"


def _error(record: RunRecord) -> str:
    ours, mean = record.number("rmse"), record.number("baseline_mean_image_rmse")
    if ours is None:
        return ""
    text = f"the {'RMSE' if len(record.victims) == 1 else 'mean RMSE'} is {format_score('rmse', ours)}"
    if mean is None or mean <= 0:
        return text
    guess = f"guessing the mean public image ({format_score('rmse', mean)})"
    if abs(ours - mean) <= _SAME * mean:
        return f"{text}, about the same as {guess}"
    if ours > mean:
        return f"{text}, worse than {guess}"
    if not ours:
        return f"{text}, a perfect copy"
    ratio = mean / ours
    return f"{text}, {f'{ratio:.1f}' if ratio < _HUGE else f'more than {_HUGE:,}'} times lower than {guess}"


def _client(record: RunRecord) -> list[Grant]:
    steps, clients = (find_setting(record.settings, f"client.{key}") for key in ("local_steps.steps", "n_clients"))
    grants = []
    if isinstance(steps, int):
        grants.append(Grant(True, f"That the update is the result of {steps} local steps, and their learning rates."))
    if isinstance(clients, int) and clients > 1:
        grants.append(Grant(False, f"The updates of single clients, only the mean over {clients} of them."))
    return grants


def _defense(record: RunRecord) -> list[Grant]:
    defense = record.settings.get("defense")
    if not isinstance(defense, Mapping):
        return []
    known = bool(find_setting(record.settings, "knowledge.defense"))
    use = "the attack simulates it on its candidates" if known else "the attack treats the update as undefended"
    return [Grant(known, f"That the update is defended by {_described(defense)}: {use}.")]


def _described(defense: Mapping[str, object]) -> str:
    """A defense and its settings, as a configuration has them."""
    name = str(defense.get("class_path", "")).rpartition(".")[2]
    arguments = defense.get("init_args")
    arguments = arguments if isinstance(arguments, Mapping) else {}
    if name == "Chain" and isinstance(arguments.get("defenses"), list):
        return " then ".join(map(_described, arguments["defenses"]))
    return f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})"


def _labels(record: RunRecord) -> Grant:
    given = find_setting(record.settings, "knowledge.labels")
    if given is None:
        return Grant(False, "Whether the labels were given is not stated in the settings.")
    if given:
        return Grant(True, "The true label of every image.")
    accuracy = record.number("label_accuracy")
    found = "" if accuracy is None else f" and got {format_score('label_accuracy', accuracy)} of them right"
    return Grant(False, f"The labels. The attack recovered them from the update{found}.")


def _batch_norm(record: RunRecord) -> list[Grant]:
    mode = _MODES.get(str(find_setting(record.settings, "client.batch_norm")))
    client = [Grant(True, f"That the client's BatchNorm layers, if any, used {mode}.")] if mode else []
    seen = _STATISTICS.get(str(find_setting(record.settings, "knowledge.batch_norm")))
    return [*client, seen or Grant(False, "What BatchNorm statistics were known is not stated.")]


#: By the settings `client.batch_norm` and `knowledge.batch_norm`.
_MODES = {
    "eval": "the running statistics of the public model (evaluation mode)",
    "train": "the statistics of its own batch (training mode)",
}
_STATISTICS = {
    "batch": Grant(
        True,
        "The statistics of the client's own batch at every BatchNorm layer: a strong assumption, which holds only "
        "where clients send them along.",
    ),
    "running": Grant(True, "The running statistics of the BatchNorm layers, which are part of the public model."),
    "none": Grant(False, "Any BatchNorm statistics: the attack used those of its own candidates."),
}
