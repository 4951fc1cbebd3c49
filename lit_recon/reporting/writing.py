"""Writers of a run's files: metrics, rows per image, images, losses."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from lit_recon.errors import ShapeError
from lit_recon.io.files import write_bytes, write_text
from lit_recon.measures import Measure
from lit_recon.reporting.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor


def write_metrics(folder: RunFolder, metrics: Mapping[str, Scalar], measures: Sequence[Measure] = ()) -> None:
    """Write `metrics.json`, which marks the run as complete: call it after all other writers.

    A value that is not finite becomes null with its reason. `measures` tell how to print the metrics among them.
    """
    content: dict[str, object] = {}
    for key, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            content[key], content[f"{key}_reason"] = None, f"not a finite number: {value}"
        else:
            content[key] = value
    if measures:
        printed = [dataclasses.asdict(measure) for measure in measures]
        limits = ("low", "high")
        content["formats"] = {
            own.pop("key"): {name: value for name, value in own.items() if value is not None or name not in limits}
            for own in printed
        }
    write_text(folder.metrics, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


_CELLS = {True: "true", False: "false", None: ""}


def write_victims(folder: RunFolder, rows: Sequence[VictimRow]) -> None:
    """Write `victims.csv`: identity, scores in the order of the first row, loss; a missing score is an empty cell."""
    names = list(rows[0].scores) if rows else []
    for row in rows:
        if list(row.scores) != names:
            raise ShapeError(f"every row needs the scores {names}; image {row.id} has {list(row.scores)}")
    header = ["batch", "id", "label", "recovered_label", "certified", *names, "loss"]
    cells = (
        [row.batch, row.id, row.label, row.recovered_label, _CELLS[row.certified], *row.scores.values(), row.loss]
        for row in rows
    )
    write_text(folder.victims, csv_text(header, cells))


def write_losses(folder: RunFolder, curves: Sequence[LossCurve]) -> None:
    """Write `logs/losses.csv`: batch, restart, `step`, `loss` and the other columns; what a curve lacks stays empty."""
    names = {name: None for curve in curves for name in ("step", "loss", *curve.values)}
    rows = (
        [curve.batch, curve.restart, *(curve.values[name][row] if name in curve.values else None for name in names)]
        for curve in curves
        for row in range(len(curve.values["step"]))
    )
    write_text(folder.losses, csv_text(["batch", "restart", *(names or ("step", "loss"))], rows))


def write_tensors(
    folder: RunFolder,
    *,
    reconstructions: Tensor,
    targets: Tensor,
    nearest_public: Tensor | None,
    labels: Tensor,
    recovered_labels: Tensor,
    class_names: Sequence[str] = (),
    features: Tensor | None = None,
    feature_batches: Tensor | None = None,
) -> None:
    """Write `reconstructions.safetensors`, row by row of the same victim; ShapeError for other shapes or pixels.

    Args:
        folder: of the run.
        reconstructions, targets, nearest_public: images `(n, c, h, w)` in [0, 1]; None without public images.
        labels, recovered_labels: true classes `(n,)`, and those that the attack recovered or was given.
        class_names: name of every class, for the report.
        features: `(r, d)` that the attack recovered, in an order of its own.
        feature_batches: number of the client batch `(r,)` that each of them is from.
    """
    images = {"reconstructions": reconstructions, "targets": targets}
    if nearest_public is not None:
        images["nearest_public"] = nearest_public
    classes = {"labels": labels, "recovered_labels": recovered_labels}
    arrays: dict[str, NDArray[Any]] = {}
    for name, image in images.items():
        if image.dim() != 4 or image.shape != targets.shape:
            raise ShapeError(
                f"{name} must be (n, c, h, w) like the targets {tuple(targets.shape)}; got {tuple(image.shape)}"
            )
        arrays[name] = array = np.ascontiguousarray(image.detach().cpu().float().numpy())
        if array.size and not (array.min() >= 0 and array.max() <= 1):
            raise ShapeError(f"{name} must hold pixels in [0, 1]; got {array.min():.3g} to {array.max():.3g}")
    for name, label in classes.items():
        if tuple(label.shape) != (len(targets),):
            raise ShapeError(f"{name} must be (n,) with n={len(targets)}; got {tuple(label.shape)}")
        arrays[name] = np.ascontiguousarray(label.detach().cpu().long().numpy())
    if features is not None and feature_batches is not None:
        arrays["features"] = np.ascontiguousarray(features.detach().cpu().float().numpy())
        arrays["feature_batches"] = np.ascontiguousarray(feature_batches.detach().cpu().long().numpy())
    write_bytes(folder.reconstructions, save(arrays, {"class_names": json.dumps(list(class_names))}))


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as CSV; None is an empty cell."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue()


#: A value or a fact of `metrics.json`; None when it is missing, with the reason under `<key>_reason`.
Scalar = str | float | int | bool | None | list[str]


@dataclass(frozen=True)
class VictimRow:
    """One attacked image."""

    batch: int  # number of the client batch that the image was in, from 0
    id: int  # index of the image in its data set
    label: int
    recovered_label: int  # by the attack, or given to it
    loss: float  # attacker-visible, of the batch's reconstruction
    scores: Mapping[str, float | None]  # `rmse`, `nearest_public_rmse`, ...; None where a score is missing
    certified: bool | None = None  # whether the attack knows that its image is the true one; None: no certificate


def write_scores(
    folder: RunFolder,
    labels: Tensor,
    recovered_labels: Tensor,
    losses: Iterable[float],
    scores: Mapping[str, Iterable[float | None]],
    certified: Sequence[bool] | None = None,
) -> None:
    """Write `victims.csv` of images that were attacked one by one, each a batch of its own; scores are `(n,)`."""
    columns = {name: [None if one is None else float(one) for one in own] for name, own in scores.items()}
    classes = zip(labels.tolist(), recovered_labels.tolist(), losses, strict=True)
    rows = [
        VictimRow(
            index,
            index,
            label,
            recovered,
            float(loss),
            {name: own[index] for name, own in columns.items()},
            None if certified is None else certified[index],
        )
        for index, (label, recovered, loss) in enumerate(classes)
    ]
    write_victims(folder, rows)


def with_deviations(scores: Mapping[str, Tensor]) -> dict[str, Scalar]:
    """Mean of every score `(n,)`, and its standard deviation over the images under `<name>_std`."""
    metrics: dict[str, Scalar] = {}
    for name, values in scores.items():
        metrics[name] = float(values.mean())
        metrics[f"{name}_std"] = float(values.std()) if len(values) > 1 else math.nan
    return metrics


@dataclass(frozen=True)
class LossCurve:
    """The losses of one restart on one batch: equally long lists by name, `step` and `loss` among them."""

    batch: int
    restart: int
    values: Mapping[str, Sequence[float]]
