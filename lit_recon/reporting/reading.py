"""The files of a run, read back with checks. Needs NumPy alone: reports are built without importing PyTorch."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from lit_recon.errors import CorruptFileError
from lit_recon.reporting.rows import LossCurve, Metric, VictimRow

_IDENTITY = ("batch", "id", "label", "recovered_label", "loss")
_CURVE = ("batch", "restart", "step", "loss")


class RunImages(NamedTuple):
    """Images float32 `(n, c, h, w)` in [0, 1], and the name of every class (empty when the run did not tell)."""

    reconstructions: NDArray[np.float32]
    targets: NDArray[np.float32]
    nearest_public: NDArray[np.float32]
    class_names: list[str]


def read_metrics(path: Path) -> dict[str, Metric]:
    """The flat figures and facts of `metrics.json`."""
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _corrupt(path, f"must be JSON: {error}") from error
    if not isinstance(metrics, dict):
        raise _corrupt(path, f"must hold a JSON object; got {type(metrics).__name__}")
    return metrics


def read_victims(path: Path) -> list[VictimRow]:
    """The rows of `victims.csv`."""
    rows = _read_table(path, _IDENTITY)
    try:
        return [
            VictimRow(
                batch=int(row["batch"]),
                id=int(row["id"]),
                label=int(row["label"]),
                recovered_label=int(row["recovered_label"]),
                loss=float(row["loss"]),
                scores={name: float(cell) if cell else None for name, cell in row.items() if name not in _IDENTITY},
            )
            for row in rows
        ]
    except ValueError as error:
        raise _corrupt(path, f"must hold numbers: {error}") from error


def read_losses(path: Path) -> list[LossCurve]:
    """The curves of `logs/losses.csv`, by batch and restart; NaN where a cell is empty."""
    curves: dict[tuple[int, int], dict[str, list[float]]] = {}
    try:
        for row in _read_table(path, _CURVE):
            values = curves.setdefault((int(row["batch"]), int(row["restart"])), {})
            for name in row.keys() - {"batch", "restart"}:
                values.setdefault(name, []).append(float(row[name]) if row[name] else math.nan)
    except ValueError as error:
        raise _corrupt(path, f"must hold numbers: {error}") from error
    return [LossCurve(batch, restart, values) for (batch, restart), values in sorted(curves.items())]


def read_images(path: Path) -> RunImages:
    """The images of `reconstructions.safetensors`."""
    names = RunImages._fields[:3]
    try:
        with safe_open(path, framework="numpy") as file:
            found = {name: file.get_tensor(name) for name in set(names) & set(file.keys())}
            class_names = json.loads((file.metadata() or {}).get("class_names", "[]"))
    except (SafetensorError, ValueError) as error:
        raise _corrupt(path, f"must be a safetensors file of a run: {error}") from error
    shapes = {name: found[name].shape for name in names if name in found}
    if len(found) != len(names) or len(set(shapes.values())) != 1 or len(shapes["targets"]) != 4:
        raise _corrupt(path, f"must hold {', '.join(names)} of one shape (n, c, h, w); got {shapes}")
    return RunImages(**found, class_names=[str(name) for name in class_names])


def _read_table(path: Path, required: Sequence[str]) -> list[Mapping[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file, strict=True))
    except (ValueError, csv.Error) as error:
        raise _corrupt(path, f"must be a CSV table: {error}") from error
    header = rows[0] if rows else []
    missing = [name for name in required if name not in header]
    if missing:
        raise _corrupt(path, f"must have the columns {', '.join(missing)}")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise _corrupt(path, f"line {number} must have {len(header)} cells; got {len(row)}")
    return [dict(zip(header, row, strict=True)) for row in rows[1:]]


def _corrupt(path: Path, problem: str) -> CorruptFileError:
    return CorruptFileError(f"{path} {problem}; restore the file or repeat the run")
