"""Tables of attacks on whole training sets, from records of `attack.py trainset`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.docs.figures import Content, shown
from benchmarks.docs.tables import markdown, metrics_of, row_of, select, table
from lit_recon.experiments.trainset.hypotheses import EXPLAINED, UNEXPLAINED, Answer, not_stationary
from lit_recon.experiments.trainset.results import SeedMean

#: Names of all records, of those of `InactiveNeurons`, and of those of `RepeatedTraining`.
_ALL, _INACTIVE, _REPEATED = "trainset_**", "trainset_inactive**", "trainset_repeated**"
#: Largest RMSE of a training image that counts as found exactly: a quarter of a step of 8-bit pixels.
EXACT = 1e-3
#: Largest RMSE of an unknown image that counts as found by repeated training, which ends at a distance of the weights.
FOUND = 0.02
#: Name of a training without a defense; names of the start from noise and of that training.
_PLAIN = "none"
_NOISE = ("noise", _PLAIN)
_KEY = re.compile(r"(?P<attack>[^.]+)\.(?P<start>.+)_(?P<share>[\d.e-]+)\.(?P<defense>[^.]+)")


@dataclass(frozen=True)
class _Group:
    """One attack, start and defense of a record; its metrics have its key at their end."""

    record: Content
    key: str
    attack: str
    start: str
    share: float
    defense: str

    def get(self, name: str) -> Any:
        """A metric; None where the record has none."""
        return metrics_of(self.record).get(f"{name}.{self.key}")

    def text(self, name: str, spec: str = ".3f") -> str:
        """A metric, with half the length of its interval where there is one; empty where there is no metric."""
        value, high = self.get(name), self.get(f"{name}_high")
        if value is None:
            return ""
        return shown(value, spec) + ("" if high is None else f" ± {shown(high - value, spec)}")

    def rate(self, name: str) -> str:
        """A share and the number of tests that it is of; empty where there is none.

        Intervals of records that do not count trainings took the tests of one training as independent: left out.
        """
        if self.get(name) is None:
            return ""
        high = self.get(f"{name}_trainings") and self.get(f"{name}_high")
        spread = "" if high is None else f" ± {shown(high - self.get(name), '.0%')}"
        return f"{shown(self.get(name), '.0%')}{spread} of {self.get(f'{name}_n')}"

    def change(self, name: str) -> str:
        """A distance at the start and at the end; empty where there is none."""
        before, after = self.get(f"{name}_before"), self.get(f"{name}_after")
        return "" if before is None else f"{shown(before, '.2g')} → {shown(after, '.2g')}"

    @property
    def certified(self) -> str:
        """Training images that the attack certifies, and wrong candidates among those; empty if it certifies none."""
        if self.get("certified") is None:
            return ""
        return f"{self.text('certified', '.3g')}, {self.text('certified_wrong', '.3g')} wrong"

    @property
    def errors(self) -> list[float]:
        """RMSE of the candidate next to each training image that is to be found, over all trainings."""
        return [row["rmse"] for row in self.images]

    @property
    def trainings(self) -> int:
        """Number of released models."""
        return len({row["seed"] for row in self.images})

    @property
    def images(self) -> list[Content]:
        """Rows of the training images that are to be found, with their nearest candidates."""
        rows: list[Content] = row_of(self.record)["tables"]["images"]
        return select(rows, attack=self.attack, start=self.start, share=self.share, defense=self.defense)

    @property
    def title(self) -> list[str]:
        """The first cells of a row: record, attack and start."""
        share = "" if self.share in (0, 1) else f" {self.share:g}"
        return [f"`{self.record['name'].removeprefix('trainset_')}`", f"`{self.attack}`", f"{self.start}{share}"]


_TITLE = ["record", "attack", "start"]


def groups(records: Sequence[Content]) -> list[_Group]:
    """All groups, in the order of the records and of their metrics."""
    return [group for record in records for group in _groups(record)]


def _groups(record: Content) -> Iterator[_Group]:
    for name in metrics_of(record):
        kind, _, key = name.partition(".")
        if kind == "n_images":
            found = _KEY.fullmatch(key)
            assert found is not None, key
            yield _Group(record, key, found["attack"], found["start"], float(found["share"]), found["defense"])


def _table(name: str, records: str, header: Sequence[str], row: Callable[[_Group], list[str] | None]) -> None:
    """Register a table with a row for every group for which the function returns one, and a note on missing cells."""

    def lines(found: Sequence[Content]) -> str:
        rows = [(group, cells) for group in groups(found) if (cells := row(group)) is not None]
        text = markdown([*_TITLE, *header], [[*group.title, *cells] for group, cells in rows])
        counts = {group.record["name"]: metrics_of(group.record).get("n_refused", 0) for group, _ in rows}
        named = [f"{n} of `{name.removeprefix('trainset_')}`" for name, n in counts.items() if n]
        return f"{text}\n\nNot applicable, and not listed, are cells: {', '.join(named)}." if named else text

    table(name, records)(lines)


def _reconstructions(group: _Group) -> list[str] | None:
    if group.share > 0 or group.defense != _PLAIN:
        return None
    public = "baseline_as_many_public_images"
    return [
        f"{group.text('n_good', '.3g')} of {group.get('n_images')}",
        f"{group.get('pool'):,}",
        group.text("best_ssim"),
        group.text("best_ssim_stretched"),
        group.text("rmse", "error"),
        group.certified,
        f"{group.text(f'{public}_n_good', '.3g')}; {group.text(f'{public}_best_ssim')}",
        group.text("seconds", ".0f"),
    ]


def _starts(group: _Group) -> list[str] | None:
    if group.defense != _PLAIN or not (group.change("distance") or group.change("stationarity")):
        return None
    return [
        group.change("distance"),
        group.change("stationarity"),
        group.text("ssim"),
        group.text("rmse", "error"),
        shown(group.get("closer_rmse"), ".0%"),
    ]


def _selection(group: _Group) -> list[str] | None:
    if group.share > 0 or group.defense != _PLAIN or group.get("restart_by_loss") is None:
        return None
    chosen = [group.text(f"selected_by_{name}_ssim") for name in ("residual", "agreement", "clusters", "truth")]
    return [group.text("restart_by_loss"), group.text("restart_by_truth"), *chosen]


def _membership(group: _Group) -> list[str] | None:
    if group.get("true_positives") is None and group.get("false_positives") is None:
        return None
    return [group.rate("true_positives"), group.rate("false_positives")]


def _defenses(group: _Group) -> list[str] | None:
    defended = any(other.defense != _PLAIN for other in _groups(group.record))
    if not defended or group.share > 0:
        return None
    scores = [group.text("n_good", ".3g"), group.text("best_ssim"), group.text("rmse", "error")]
    return ["" if group.defense == _PLAIN else group.defense, shown(group.get("accuracy"), ".1%"), *scores]


def _inactive(group: _Group) -> list[str] | None:
    errors = group.errors
    return [
        "" if group.defense == _PLAIN else group.defense,
        str(group.get("n_images")),
        str(group.trainings),
        group.certified,
        f"{sum(error <= EXACT for error in errors)} of {len(errors)}",
        shown(max((error for error in errors if error <= EXACT), default=None), ".1e"),
        shown(max(errors), ".2g"),
        shown(group.get("accuracy"), ".1%"),
        group.text("seconds", ".0f"),
    ]


def _repeated(group: _Group) -> list[str] | None:
    errors = group.errors
    return [
        str(group.get("n_images")),
        str(group.trainings),
        group.certified,
        f"{sum(error <= FOUND for error in errors)} of {len(errors)}",
        shown(statistics.median(errors), ".2g"),
        shown(max(errors), ".2g"),
        shown(statistics.median(row["nearest_public_rmse"] for row in group.images), ".2g"),
        group.text("seconds", ".0f"),
    ]


_table(
    "trainset",
    _ALL,
    ["SSIM > 0.4", "pool", "SSIM, best 10", "min-max scaled", "RMSE", "certified", "as many public images", "seconds"],
    _reconstructions,
)
_table(
    "trainset_starts",
    _ALL,
    ["parameter distance", "stationarity, best multipliers", "SSIM", "RMSE", "closer to training images"],
    _starts,
)
_table(
    "trainset_selection",
    _ALL,
    ["restart by loss", "restart by truth", "residual", "agreement", "clusters", "truth"],
    _selection,
)
_table("trainset_membership", _ALL, ["true positives", "false positives"], _membership)
_table("trainset_defenses", _ALL, ["defense", "accuracy", "images with SSIM > 0.4", "SSIM, best 10", "RMSE"], _defenses)
_table(
    "trainset_inactive",
    _INACTIVE,
    [
        "defense",
        "images",
        "trainings",
        "certified",
        "exact",
        "their largest RMSE",
        "largest RMSE of all",
        "accuracy",
        "seconds",
    ],
    _inactive,
)


_table(
    "trainset_repeated",
    _REPEATED,
    [
        "unknown",
        "trainings",
        "certified",
        "found",
        "median RMSE",
        "largest RMSE",
        "median of the nearest public images",
        "seconds",
    ],
    _repeated,
)


#: Beginnings of the hypotheses that the page numbers.
_HYPOTHESES = ("Starts that look real", "Random starts", "The uncertainty protects", "The landscape")


#: A comparison of older records, of the residual at the end with that at the start, which depends on the attack.
_FALL = "0.1 minus the share of its own residual or distance that is left, from noise"


def answers(record: Content) -> list[Content]:
    """The hypotheses of a study.

    Older records judged `_FALL`: in its place is what is left of the weights, of which they hold means over trainings.
    They judged landscapes also where the weights are not stationary.
    """
    found: list[Content] = row_of(record)["tables"].get("hypotheses", [])
    judged = [_explained(record, own) if own["compared"] == _FALL else own for own in found]
    return [_landscape(record, own) if own["hypothesis"].startswith(_HYPOTHESES[3]) else own for own in judged]


def _landscape(record: Content, own: Content) -> Content:
    own_groups = [group for group in _groups(record) if (group.attack, group.defense) == (own["attack"], _PLAIN)]
    true = [group.get("stationarity_before") for group in own_groups if group.share == 1]
    missing = not_stationary(max((value for value in true if value is not None), default=None))
    return {**own, "answer": f"not judged: {missing}"} if missing else own


def _explained(record: Content, own: Content) -> Content:
    [noise] = [
        group for group in _groups(record) if (group.attack, group.start, group.defense) == (own["attack"], *_NOISE)
    ]
    left = noise.get("distance_after")
    left = noise.get("residual_after") ** 0.5 if left is None else left
    difference = SeedMean(EXPLAINED - left, None)
    answer = Answer(own["hypothesis"], own["attack"], UNEXPLAINED, difference)
    return {**own, "compared": UNEXPLAINED, "difference": difference.value, "half": None, "answer": answer.verdict}


@table("trainset_hypotheses", _ALL)
def hypotheses(records: list[Content]) -> str:
    """The answers of every study that has the starts for them."""
    rows = []
    for record in records:
        for own in answers(record):
            number = next(n for n, beginning in enumerate(_HYPOTHESES, 1) if own["hypothesis"].startswith(beginning))
            half = "" if own.get("half") is None else f" ± {shown(own['half'], '.2g')}"
            value = f"{shown(own['difference'], '.3g')}{half}"
            name = record["name"].removeprefix("trainset_")
            rows.append([f"H{number}", f"`{name}`", f"`{own['attack']}`", own["compared"], value, own["answer"]])
    return markdown(["hypothesis", "record", "attack", "difference", "value", "answer"], rows)
