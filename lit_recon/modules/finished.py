"""Victims that are done: one file per group, so that a run never attacks them again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from lit_recon.errors import CorruptFileError
from lit_recon.modules.resumable import Outcome
from lit_recon.records import Reconstruction
from lit_recon.reporting.atomic import write_bytes

_SUFFIX = ".safetensors"
_HEADER = "lit_recon.victims"


@dataclass(frozen=True)
class FinishedBatch:
    """The attack on one client's batch.

    Attributes:
        index: of the batch, see `VictimBatch`.
        reconstruction: in the attack's order, on the CPU.
        curves: loss curve of every restart.
        seconds: this batch's share of its group's time.
        timed_seconds, timed_steps: this batch's share of the iterations' time, and how many iterations that is.
        feature_scores: `(n,)` per image of the batch, where the attack recovers features; see `lit_recon.metrics`.
    """

    index: int
    reconstruction: Reconstruction
    curves: list[dict[str, list[float]]]
    seconds: float
    timed_seconds: float
    timed_steps: int
    feature_scores: dict[str, list[float]] = field(default_factory=dict)


def group_name(indices: Sequence[int]) -> str:
    """File name, without ending, of a group of batches."""
    return f"victims_{indices[0]:04d}-{indices[-1]:04d}"


def finished_batches(
    indices: Sequence[int], outcome: Outcome, feature_scores: Sequence[dict[str, list[float]]]
) -> list[FinishedBatch]:
    """A group's outcome, batch by batch."""
    n = len(indices)
    return [
        FinishedBatch(
            index,
            Reconstruction(
                result.images.cpu(),
                result.labels.cpu(),
                float(result.loss),
                result.trace,
                tuple(result.notes),
                None if result.features is None else result.features.cpu().float(),
            ),
            curves,
            outcome.seconds / n,
            outcome.timed_seconds / n,
            outcome.timed_steps,
            scores,
        )
        for index, result, curves, scores in zip(
            indices, outcome.reconstructions, outcome.curves, feature_scores, strict=True
        )
    ]


def save_finished(folder: Path, batches: Sequence[FinishedBatch]) -> None:
    """Write a group's file; it appears whole or not at all."""
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, dict[str, object]] = {}
    for batch in batches:
        tensors[f"{batch.index}.images"] = batch.reconstruction.images.contiguous()
        tensors[f"{batch.index}.labels"] = batch.reconstruction.labels.contiguous()
        if batch.reconstruction.features is not None:
            tensors[f"{batch.index}.features"] = batch.reconstruction.features.contiguous()
        facts[str(batch.index)] = {
            "loss": batch.reconstruction.loss,
            "trace": batch.reconstruction.trace,
            "notes": batch.reconstruction.notes,
            "curves": batch.curves,
            "seconds": batch.seconds,
            "timed_seconds": batch.timed_seconds,
            "timed_steps": batch.timed_steps,
            "feature_scores": batch.feature_scores,
        }
    path = folder / (group_name([batch.index for batch in batches]) + _SUFFIX)
    write_bytes(path, save(tensors, {_HEADER: json.dumps(facts)}))


def load_finished(folder: Path) -> dict[int, FinishedBatch]:
    """All finished batches below `folder`, by index.

    Raises:
        CorruptFileError: a file cannot be read.
    """
    found: dict[int, FinishedBatch] = {}
    for path in sorted(folder.glob(f"victims_*{_SUFFIX}")):
        found |= _read(path)
    return found


def _read(path: Path) -> dict[int, FinishedBatch]:
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})[_HEADER])
            return {
                int(index): FinishedBatch(
                    int(index),
                    Reconstruction(
                        file.get_tensor(f"{index}.images"),
                        file.get_tensor(f"{index}.labels"),
                        fact["loss"],
                        fact["trace"],
                        tuple(fact["notes"]),
                        file.get_tensor(f"{index}.features") if f"{index}.features" in file.keys() else None,  # noqa: SIM118
                    ),
                    fact["curves"],
                    fact["seconds"],
                    fact["timed_seconds"],
                    fact["timed_steps"],
                    fact.get("feature_scores", {}),
                )
                for index, fact in facts.items()
            }
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise CorruptFileError(
            f"{path} is damaged ({error}): delete it, and these victims are attacked from the start"
        ) from error
