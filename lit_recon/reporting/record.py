"""A finished run, read from the files in its folder."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from lit_recon.errors import CorruptFileError
from lit_recon.io.files import parse_json
from lit_recon.measures import Measure
from lit_recon.reporting.provenance import read_settings
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import LossCurve, Scalar, VictimRow

_REMEDY = "restore the file or repeat the run"
_IDENTITY = ("batch", "id", "label", "recovered_label")
_FORMAT = ("name", "higher_is_better", "decimals", "unit")
_LIMITS = ("low", "high")  # written where there are any
_CERTIFIED = {"true": True, "false": False, "": None}
_CURVE = ("batch", "restart", "step", "loss")


class RunImages(NamedTuple):
    """Images float32 `(n, c, h, w)` in [0, 1], and names of the classes; fields as in `RunRecord`."""

    reconstructions: NDArray[np.float32]
    targets: NDArray[np.float32]
    nearest_public: NDArray[np.float32] | None
    class_names: list[str]
    labels: NDArray[np.int64] | None


def read_metrics(path: Path) -> dict[str, Scalar]:
    """The flat values and facts of `metrics.json`."""
    metrics = read_json(path)
    metrics.pop("formats", None)
    return metrics


def read_measures(path: Path) -> dict[str, Measure]:
    """How the run's metrics are printed, by key; empty for runs of earlier releases."""
    try:
        stated = read_json(path).get("formats", {}).items()
        return {
            str(key): Measure(str(key), **{n: own[n] for n in _FORMAT}, **{n: own[n] for n in _LIMITS if n in own})
            for key, own in stated
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise _corrupt(path, f"must hold {', '.join(_FORMAT)} of every metric under formats") from error


def read_json(path: Path, remedy: str = _REMEDY) -> dict[str, Any]:
    """The JSON object in a file; `remedy` says in messages what to do without it."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _corrupt(path, f"must be JSON: {error}", remedy) from error
    if not isinstance(content, dict):
        raise _corrupt(path, f"must hold a JSON object; got {type(content).__name__}", remedy)
    return content


def read_arrays(path: Path, remedy: str = _REMEDY) -> dict[str, NDArray[np.float32]]:
    """The arrays of a safetensors file; `remedy` says in messages what to do without it."""
    try:
        return load_file(path)
    except Exception as error:  # damaged headers raise errors of many kinds
        raise _corrupt(path, f"must be a safetensors file: {error}", remedy) from error


def read_victims(path: Path) -> list[VictimRow]:
    """The rows of `victims.csv`."""
    rows = read_table(path, (*_IDENTITY, "loss"))
    try:
        return [
            VictimRow(
                **{name: int(row.pop(name)) for name in _IDENTITY},
                loss=float(row.pop("loss")),
                certified=_CERTIFIED[row.pop("certified", "")],
                scores={name: float(cell) if cell else None for name, cell in row.items()},
            )
            for row in rows
        ]
    except (KeyError, ValueError) as error:
        raise _corrupt(path, f"must hold numbers, and true or false under certified: {error}") from error


def read_losses(path: Path) -> list[LossCurve]:
    """The curves of `logs/losses.csv`, by batch and restart; NaN where a cell is empty."""
    curves: dict[tuple[int, int], dict[str, list[float]]] = {}
    try:
        for row in read_table(path, _CURVE):
            values = curves.setdefault((int(row["batch"]), int(row["restart"])), {})
            for name in row.keys() - {"batch", "restart"}:
                values.setdefault(name, []).append(float(row[name]) if row[name] else math.nan)
    except ValueError as error:
        raise _corrupt(path, f"must hold numbers: {error}") from error
    return [LossCurve(batch, restart, values) for (batch, restart), values in sorted(curves.items())]


def read_images(path: Path) -> RunImages:
    """The images of `reconstructions.safetensors`."""
    names, needed = RunImages._fields[:3], RunImages._fields[:2]
    try:
        with safe_open(path, framework="numpy") as file:
            found = {name: file.get_tensor(name) for name in set(names) & set(file.keys())}
            class_names = parse_json((file.metadata() or {}).get("class_names", "[]"))
            found_labels = file.get_tensor("labels") if "labels" in file.keys() else None  # noqa: SIM118  a file handle
    except Exception as error:  # damaged headers raise errors of many kinds
        raise _corrupt(path, f"must be a safetensors file of a run: {error}") from error
    shapes = {name: found[name].shape for name in names if name in found}
    if not set(needed) <= set(found) or len(set(shapes.values())) != 1 or len(shapes["targets"]) != 4:
        raise _corrupt(path, f"must hold {', '.join(names)} of one shape (n, c, h, w); got {shapes}")
    outside = [name for name in shapes if found[name].dtype != np.float32 or not _in_range(found[name])]
    if outside:
        raise _corrupt(path, f"must hold float32 pixels in [0, 1]; {', '.join(outside)} has others")
    if not isinstance(class_names, list):
        raise _corrupt(path, "must list the names of classes")
    nearest = found.get("nearest_public")
    names_of_classes = [str(name) for name in class_names]
    return RunImages(found["reconstructions"], found["targets"], nearest, names_of_classes, found_labels)


def read_victim_images(run: RunFolder) -> tuple[list[VictimRow], RunImages]:
    """The rows of `victims.csv`, and the images of `reconstructions.safetensors` in the same order."""
    victims, images = read_victims(run.victims), read_images(run.reconstructions)
    if len(images.targets) != len(victims):
        raise CorruptFileError(
            f"{run.reconstructions} holds {len(images.targets)} images, but {run.victims.name} has {len(victims)} "
            "rows: the files are of two runs; repeat the run"
        )
    if images.labels is not None and images.labels.tolist() != [row.label for row in victims]:
        raise _corrupt(run.victims, f"has other labels than {run.reconstructions.name}: they are of two runs")
    return victims, images


def _in_range(pixels: NDArray[np.float32]) -> bool:
    return bool(pixels.size == 0 or (pixels.min() >= 0 and pixels.max() <= 1))  # NaN is in no range


def read_table(path: Path, required: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV table with these columns, and perhaps others."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file, strict=True))
    except (OSError, ValueError, csv.Error) as error:
        raise _corrupt(path, f"must be a CSV table: {error}") from error
    header = rows[0] if rows else []
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise _corrupt(path, f"has several columns {', '.join(repeated)}")
    missing = [name for name in required if name not in header]
    if missing:
        raise _corrupt(path, f"must have the columns {', '.join(missing)}")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise _corrupt(path, f"line {number} must have {len(header)} cells; got {len(row)}")
    return [dict(zip(header, row, strict=True)) for row in rows[1:]]


def _corrupt(path: Path, problem: str, remedy: str = _REMEDY) -> CorruptFileError:
    return CorruptFileError(f"{path} {problem}; {remedy}")


@dataclass(frozen=True)
class RunRecord:
    """A finished run; rows and images, float32 `(n, c, h, w)` in [0, 1], are in the same order."""

    folder: RunFolder
    settings: Mapping[str, object]  # the nested configuration
    metrics: Mapping[str, Scalar]  # flat values and facts
    victims: list[VictimRow]
    reconstructions: NDArray[np.float32]
    targets: NDArray[np.float32]
    nearest_public: NDArray[np.float32] | None  # None for a run without public images
    class_names: list[str] = field(default_factory=list)  # empty when the run did not tell
    losses: list[LossCurve] = field(default_factory=list)  # one per batch and restart
    measures: Mapping[str, Measure] = field(default_factory=dict)  # see `read_measures`

    @classmethod
    def read(cls, folder: RunFolder | Path) -> RunRecord:
        """Read a finished run; MissingDataError without one, CorruptFileError for malformed or contradictory files."""
        run = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        run.require_finished()
        for path in (run.config, run.victims, run.reconstructions):
            if not path.is_file():
                raise CorruptFileError(
                    f"{run.path} holds a finished run without {path.name}: restore the file or repeat the run"
                )
        victims, images = read_victim_images(run)
        return cls(
            run,
            read_settings(run.config),
            read_metrics(run.metrics),
            victims,
            *images[:-1],
            losses=read_losses(run.losses) if run.losses.is_file() else [],
            measures=read_measures(run.metrics),
        )

    def number(self, key: str) -> float | None:
        """The value under `key`; None where it is absent, null, or no number."""
        value = self.metrics.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def text(self, key: str) -> str:
        """The fact under `key` as text; empty where it is absent or null."""
        value = self.metrics.get(key)
        return "" if value is None else str(value)
