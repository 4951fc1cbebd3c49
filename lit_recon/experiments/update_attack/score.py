"""What a finished attack leaves in its folder: images, rows, curves, the page, and last of all the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lit_recon._torchvision

import torch
from pytorch_lightning.loggers import Logger

from lit_recon.data.batches import VictimBatches
from lit_recon.modules.attack_state import load_finished
from lit_recon.modules.data import VictimDataModule
from lit_recon.modules.loggers import log_table
from lit_recon.modules.scoring import ScoredBatch, score_batches
from lit_recon.modules.update_attack import UpdateAttackModule
from lit_recon.reporting.pages import build_report
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import (
    LossCurve,
    Scalar,
    VictimRow,
    write_losses,
    write_metrics,
    write_tensors,
    write_victims,
)


def all_scored(module: UpdateAttackModule, victims: VictimDataModule, folder: RunFolder) -> list[ScoredBatch]:
    """Every batch of the run in order; those of other processes are read from their files and scored here."""
    own = {scored.batch.index: scored for scored in module.scored}
    others = [batch for batch in VictimBatches(victims.test, victims.batches) if batch.index not in own]
    if others:
        done = load_finished(folder.checkpoints)
        scored = score_batches([done[batch.index] for batch in others], others, victims.public, module.lpips)
        own |= {part.batch.index: part for part in scored}
    return [own[index] for index in sorted(own)]


def write_outcome(
    folder: RunFolder, scored: Sequence[ScoredBatch], metrics: Mapping[str, Scalar], class_names: Sequence[str]
) -> None:
    """Write everything; the figures come last and mark the run as complete, the page is built from all of it.

    Args:
        folder: of the run.
        scored: all batches in order.
        metrics: entries of the record.
        class_names: for the page.
    """
    write_tensors(
        folder,
        reconstructions=torch.cat([part.scores.reconstructions for part in scored]),
        targets=torch.cat([part.batch.images.cpu() for part in scored]),
        nearest_public=torch.cat([part.nearest_public for part in scored]),
        labels=torch.cat([part.batch.labels.cpu() for part in scored]),
        recovered_labels=torch.cat([part.scores.recovered_labels for part in scored]),
        class_names=class_names,
        **_features(scored),
    )
    write_victims(folder, [row for part in scored for row in _rows(part)])
    curves = [
        LossCurve(part.batch.index, restart, curve)
        for part in scored
        for restart, curve in enumerate(part.finished.curves)
        if curve
    ]
    write_losses(folder, curves)
    write_metrics(folder, metrics)
    build_report(folder.path)


def show_outcome(loggers: Sequence[Logger], scored: Sequence[ScoredBatch]) -> None:
    """Show every victim's figures, from all processes, as one table on W&B."""
    rows = [row for part in scored for row in _rows(part)]
    columns = ["batch", "id", "label", "recovered_label", "loss", *rows[0].scores]
    cells = [[row.batch, row.id, row.label, row.recovered_label, row.loss, *row.scores.values()] for row in rows]
    log_table(loggers, "victims", columns, cells)


def run_facts(scored: Sequence[ScoredBatch], device: str, notes: Sequence[str] = ()) -> dict[str, Scalar]:
    """Size, cost, machine and notes of a run, for its record; those in `notes` come first."""
    timed = sum(part.finished.timed_steps for part in scored)
    seconds = sum(part.finished.timed_seconds for part in scored)
    found = [note for part in scored for note in part.finished.reconstruction.notes]
    facts: dict[str, Scalar] = {
        "n": sum(len(part.batch.labels) for part in scored),
        "n_batches": len(scored),
        "seconds": sum(part.finished.seconds for part in scored),
        "seconds_per_iteration": seconds / timed if timed else None,
    }
    if not timed:
        facts["seconds_per_iteration_reason"] = "the attack took a single step"
    return {**facts, "notes": list(dict.fromkeys([*notes, *found])), **environment(device)}


def _features(scored: Sequence[ScoredBatch]) -> dict[str, torch.Tensor]:
    """Recovered features of all batches, and whose they are; nothing where none were recovered."""
    found = [(part.batch.index, part.finished.reconstruction.features) for part in scored]
    rows = [(index, features) for index, features in found if features is not None]
    if not rows:
        return {}
    owners = [torch.full((len(features),), index) for index, features in rows]
    return {"features": torch.cat([features for _, features in rows]), "feature_batches": torch.cat(owners)}


def _rows(part: ScoredBatch) -> list[VictimRow]:
    """One row per image of a batch."""
    columns = {
        **part.scores.per_image,
        **dict.fromkeys(part.scores.unavailable),
        **{f"{base}_rmse": scores["rmse"] for base, scores in part.baselines.items()},
    }
    return [
        VictimRow(
            batch=part.batch.index,
            id=int(part.batch.ids[i]),
            label=int(part.batch.labels[i]),
            recovered_label=int(part.scores.recovered_labels[i]),
            loss=part.finished.reconstruction.loss,
            scores={name: None if values is None else float(values[i]) for name, values in columns.items()},
        )
        for i in range(len(part.batch.labels))
    ]
