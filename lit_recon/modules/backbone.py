"""Training of a backbone: plain, or from whichever module says how a step's gradient comes about."""

from __future__ import annotations

import zipfile
from pathlib import Path

import lit_recon._torchvision

from pytorch_lightning import LightningDataModule, Trainer
from torch import Tensor, nn

from lit_recon.errors import CorruptFileError, RunExistsError
from lit_recon.training.callbacks import BACKBONE_FILE, LAST_CHECKPOINT
from lit_recon.training.module import ImageBatch, TrainingModule


class BackboneModule(TrainingModule):
    """Plain training: steps along the gradient of the mean cross-entropy of a batch."""

    def training_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.record_loss(loss, len(labels))
        return loss


def train_backbone(trainer: Trainer, module: TrainingModule, datamodule: LightningDataModule, out: Path) -> Path:
    """Train, or go on with a training that was killed, until the trainer's `max_epochs`.

    A resumed training ends with the weights of one that was never interrupted, provided that the batches are functions
    of seed, epoch and position, as `BackboneDataModule`'s are. Training draws no other random numbers than those of a
    defense or of a privacy mechanism, which are functions of seed, step and process.

    Args:
        trainer: with `training_callbacks(out, ...)` among its callbacks.
        module: model and optimizer.
        datamodule: batches of images in [0, 1] and labels.
        out: the run folder.

    Returns:
        Path of the backbone.

    Raises:
        RunExistsError: `out` already holds a backbone.
        CorruptFileError: the state of a killed training cannot be read.
    """
    exported, last = out / BACKBONE_FILE, out / LAST_CHECKPOINT
    if exported.exists():
        raise RunExistsError(f"{exported} is already trained: choose another output folder, or delete it to train anew")
    if last.exists() and not zipfile.is_zipfile(last):
        raise CorruptFileError(f"{last} is truncated or not a training state: delete it to start over")
    trainer.fit(module, datamodule=datamodule, ckpt_path=last if last.exists() else None, weights_only=True)
    return exported
