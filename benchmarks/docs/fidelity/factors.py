"""Values of studies of released models: of factors, of numbers of shadow models, and of privacy budgets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.docs.fidelity.items import Found, newest, table_of
from benchmarks.docs.figures import Content, Figures, shown
from benchmarks.docs.tables import factor_rows, metrics_of, select

#: Metrics of a study of factors: as cells name them, and their format.
WORDS = {
    "mse": ("MSE", ".4f"),
    "lpips": ("LPIPS", ".4f"),
    "kl": ("KL", ".4f"),
    "train_accuracy": ("training accuracy", ".3f"),
    "accuracy": ("test accuracy", ".3f"),
    "membership_auc": ("AUC", ".2f"),
}
_ONLY = re.compile(r" --only (?:'[^']*'|\S+)")


@dataclass(frozen=True)
class Factor:
    """Metrics of a study of factors, at one value of a factor or at all of them.

    Args:
        record: name of the records: that of the study, behind `two_cores_` where it was run on two cores.
        factor: that is varied.
        value: its label; None: all values.
        line: the further settings; None: all of them.
        metrics: that are shown.
        on_first_layer: label of the same setting in the factor `first_layer`, whose value follows, if it is there.
    """

    record: str
    factor: str
    value: str | None = None
    line: str | None = ""
    metrics: tuple[str, ...] = ("mse",)
    on_first_layer: str = ""

    @property
    def study(self) -> str:
        """The name of its configuration."""
        return self.record.removeprefix("two_cores_")

    def __call__(self, figures: Figures) -> Found | None:
        groups: dict[str, list[Mapping[str, object]]] = {}
        used: dict[str, Content] = {}
        for row, record in factor_rows(figures.find(f"all {self.record}**")):
            label, line = _label(row.get("value")), str(row.get("line", ""))
            if row["factor"] == self.factor and self.value in (None, label) and self.line in (None, line):
                groups.setdefault(", ".join(filter(None, (line, label))), []).append(row)
                if row.get("mse") is not None:
                    used[str(record["path"])] = record
        cells = {title: text for title, rows in groups.items() if (text := self._cell(rows))}
        texts = (
            list(cells.values()) if self.value is not None else [f"{title}: {text}" for title, text in cells.items()]
        )
        other = None
        if self.on_first_layer:
            other = replace(self, factor="first_layer", value=self.on_first_layer, line="", on_first_layer="")(figures)
            texts += [f"on the first layer {other.text}"] if other else []
        records = {path: _computing(record, self.factor) for path, record in used.items()}
        for record in other.records if other else ():
            path = str(record["path"])
            records[path] = _computing(record, self.factor, "first_layer") if path in used else record
        return Found("; ".join(texts), list(records.values())) if texts else None

    def _cell(self, rows: list[Mapping[str, object]]) -> str:
        """Means over the seeds; a single metric has no title."""
        values = {key: [float(str(row[key])) for row in rows if row.get(key) is not None] for key in self.metrics}
        texts = {key: shown(fmean(own), WORDS[key][1]) for key, own in values.items() if own}
        return ", ".join(text if len(self.metrics) == 1 else f"{WORDS[key][0]} {text}" for key, text in texts.items())


def _computing(record: Content, *factors: str) -> Content:
    """A record with the command for these factors: of a study in parts, it has that of the last part."""
    return record | {"command": _ONLY.sub(f" --only '[{','.join(factors)}]'", record["command"])}


@dataclass(frozen=True)
class Trained:
    """Accuracies and membership AUC of a released model without an attack."""

    known_images: int
    optimizer: str
    epochs: int

    def __call__(self, figures: Figures) -> Found | None:
        record = newest(figures, "released_training")
        rows = select(record["rows"], known_images=self.known_images, optimizer=self.optimizer) if record else []
        models = [model for row in rows for model in row["models"] if model["epochs"] == self.epochs]
        if record is None or not models:
            return None
        names = ("train_accuracy", "accuracy", "membership_auc")
        return Found(", ".join(f"{WORDS[key][0]} {shown(models[0][key], WORDS[key][1])}" for key in names), [record])


def _label(value: object) -> str:
    """The label of a value, which a CSV file may have turned into a number."""
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value)


def curve(figures: Figures) -> Found | None:
    """The error of one run by its number of shadow models."""
    record = newest(figures, "mnist_small")
    if record is None:
        return None
    found = metrics_of(record)
    errors = {int(key.split("_")[2]): value for key, value in found.items() if key.startswith("mse_at_")}
    errors[found["n_shadow"]] = found["mse"]
    return Found(", ".join(f"{n:,}: {shown(value, '.4f')}" for n, value in sorted(errors.items())), [record])


@dataclass(frozen=True)
class Private:
    """Error and accuracy by epsilon of a study of robustness."""

    record: str

    def __call__(self, figures: Figures) -> Found | None:
        record = newest(figures, self.record)
        rows = [row for row in table_of(record, "rero") if "epsilon" in row] if record else []
        cells = {
            float(str(row["epsilon"])): f"{shown(row['mse'], '.4f')} ({shown(row['accuracy'], '.0%')})" for row in rows
        }
        text = ", ".join(f"{epsilon:,.0f}: {cell}" for epsilon, cell in sorted(cells.items()))
        return Found(text, [record]) if record and text else None
