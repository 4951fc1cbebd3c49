"""The callbacks that make a training survive a kill and leave its backbone behind."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lit_recon._torchvision

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint

from lit_recon.errors import ConfigError
from lit_recon.models import BackboneCheckpoint, save_backbone
from lit_recon.training.module import TrainingModule, write_utility

#: Names inside a run folder.
BACKBONE_FILE = "backbone.safetensors"
LAST_CHECKPOINT = "checkpoints/last.ckpt"


class LastCheckpoint(Checkpoint):
    """Keeps the newest state of training in one file, replaced in one step, after every epoch and every few minutes.

    Lightning's own ModelCheckpoint copies the file from the system's temporary folder: a kill could leave half of it.

    Args:
        path: of the file.
        minutes: between two saves within an epoch; going on from there needs a data loader with a state.
    """

    def __init__(self, path: Path, minutes: float = 5.0) -> None:
        self.path, self.minutes = path, minutes
        self._saved_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save where the interval is over; the last batch leaves it to the end of the epoch."""
        due = time.monotonic() - self._saved_at > 60 * self.minutes
        if not trainer.is_last_batch and trainer.strategy.broadcast(due):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save; Lightning calls this after validation."""
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        part = self.path.with_name(f"{self.path.name}.part")
        trainer.save_checkpoint(part, weights_only=False)
        if trainer.is_global_zero:
            os.replace(part, self.path)
        self._saved_at = time.monotonic()


class ExportBackbone(Callback):
    """Writes the trained backbone and, before it, its utility when training has ended.

    Args:
        out: the run folder.
        class_names: one per output.
        split_hash: of the data it was trained on.
    """

    def __init__(self, out: Path, class_names: list[str], split_hash: str) -> None:
        self.out, self.class_names, self.split_hash = out, class_names, split_hash

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the files, once for all processes."""
        if not isinstance(pl_module, TrainingModule):
            raise ConfigError(f"only a TrainingModule can be exported as a backbone; got {type(pl_module).__name__}")
        if not trainer.is_global_zero:
            return
        write_utility(self.out, pl_module.utility)
        accuracy = pl_module.utility.get("accuracy")
        checkpoint = BackboneCheckpoint(
            pl_module.model,
            self.class_names,
            self.split_hash,
            trainer.current_epoch,
            accuracy if isinstance(accuracy, float) else None,
        )
        save_backbone(self.out / BACKBONE_FILE, checkpoint)


def training_callbacks(out: Path, class_names: list[str], split_hash: str, minutes: float = 5.0) -> list[Callback]:
    """What a Trainer needs for `train_backbone`: resumable state and the exported backbone, both below `out`.

    Args:
        out: the run folder.
        class_names: one per output, stored with the backbone.
        split_hash: of the training data, stored with the backbone.
        minutes: between two saves within an epoch.
    """
    return [ExportBackbone(out, class_names, split_hash), LastCheckpoint(out / LAST_CHECKPOINT, minutes)]
