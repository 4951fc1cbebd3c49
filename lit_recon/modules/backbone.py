"""Training of a backbone, and the callbacks that make it survive a kill and leave one file behind."""

from __future__ import annotations

import os
import time
import zipfile
from pathlib import Path
from typing import Any

import lit_recon._torchvision

from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint
from torch import Tensor, nn, optim
from torchmetrics import MeanMetric

from lit_recon.errors import ConfigError, CorruptFileError, RunExistsError
from lit_recon.models import Backbone, BackboneCheckpoint, save_backbone

#: Names inside a run folder.
BACKBONE_FILE = "backbone.safetensors"
LAST_CHECKPOINT = "checkpoints/last.ckpt"

#: Neurons of unit size up to which a head behind a wide feature layer learns at the full rate.
FULL_RATE_NEURONS = 64

Batch = tuple[Tensor, Tensor]


class BackboneModule(LightningModule):
    """Cross-entropy training by SGD with a stepwise decaying rate; logs `train_loss`, `test_loss` and `test_accuracy`.

    Parameters that do not require a gradient, such as the random rows of a wide feature layer, never reach the
    optimizer: neither a step nor weight decay moves them. The head behind such a layer of m neurons learns at the rate
    `lr * 64 / m`: one step changes a logit in proportion to m times the rate, and at the full rate thousands of random
    neurons let the loss grow instead of fall.

    Args:
        model: takes images `(n, c, h, w)` in [0, 1].
        lr: initial learning rate.
        momentum: of SGD.
        weight_decay: L2 penalty; the paper is silent about it, this is the usual value.
        decay_every: epochs between two decays of the rate.
        decay: factor of each decay.

    Raises:
        ConfigError: a rate or an interval that is not positive.

    Source: Liu et al. 2025, appendix F: 0.1, 0.9, a tenth every 50 of 200 epochs, batch 64.
    """

    def __init__(
        self,
        model: Backbone,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        decay_every: int = 50,
        decay: float = 0.1,
    ) -> None:
        super().__init__()
        if lr <= 0 or decay <= 0 or decay_every < 1:
            raise ConfigError(
                f"lr and decay must be above 0 and decay_every at least 1 epoch; "
                f"got lr={lr}, decay={decay}, decay_every={decay_every}"
            )
        self.model = model
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.decay_every, self.decay = decay_every, decay
        # metrics that sum over images: Lightning's own mean is off where processes hold unequal shares of the split
        self.test_loss, self.test_accuracy = MeanMetric(), MeanMetric()

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, k)` of images `(n, c, h, w)` in [0, 1]."""
        logits: Tensor = self.model(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean cross-entropy of a batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=len(labels), sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss and accuracy on the test split, after every epoch."""
        self._evaluate(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss and accuracy on the test split."""
        self._evaluate(batch)

    def _evaluate(self, batch: Batch) -> None:
        images, labels = batch
        logits = self(images)
        self.test_loss.update(nn.functional.cross_entropy(logits, labels, reduction="none"))
        self.test_accuracy.update((logits.argmax(dim=1) == labels).float())
        self.log_dict({"test_loss": self.test_loss, "test_accuracy": self.test_accuracy}, prog_bar=True)

    def configure_optimizers(self) -> tuple[list[optim.Optimizer], list[optim.lr_scheduler.LRScheduler]]:
        """SGD on everything trainable, and the decay of its rates."""
        layer, head = self.model.feature_layer, list(self.model.head.parameters())
        others = [
            parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and not name.startswith("head.")
        ]
        head_lr = self.lr if layer is None else self.lr * min(1.0, FULL_RATE_NEURONS / layer.n_neurons)
        groups = [{"params": others, "lr": self.lr}, {"params": head, "lr": head_lr}]
        optimizer = optim.SGD(groups, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        return [optimizer], [optim.lr_scheduler.StepLR(optimizer, self.decay_every, self.decay)]


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
    """Writes the trained backbone when training has ended.

    Args:
        path: of the safetensors file.
        class_names: one per output.
        split_hash: of the data it was trained on.
    """

    def __init__(self, path: Path, class_names: list[str], split_hash: str) -> None:
        self.path, self.class_names, self.split_hash = path, class_names, split_hash
        self.accuracy: float | None = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the accuracy."""
        if not trainer.sanity_checking:
            self.accuracy = float(trainer.callback_metrics["test_accuracy"])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file, once for all processes."""
        if trainer.is_global_zero:
            save_backbone(
                self.path,
                BackboneCheckpoint(
                    _backbone_of(pl_module), self.class_names, self.split_hash, trainer.current_epoch, self.accuracy
                ),
            )

    def state_dict(self) -> dict[str, Any]:
        """The accuracy: a run that was killed after its last epoch is not evaluated again."""
        return {"accuracy": self.accuracy}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.accuracy = state_dict["accuracy"]


def training_callbacks(out: Path, class_names: list[str], split_hash: str, minutes: float = 5.0) -> list[Callback]:
    """What a Trainer needs for `train_backbone`: resumable state and the exported backbone, both below `out`.

    Args:
        out: the run folder.
        class_names: one per output, stored with the backbone.
        split_hash: of the training data, stored with the backbone.
        minutes: between two saves within an epoch.
    """
    return [
        ExportBackbone(out / BACKBONE_FILE, class_names, split_hash),
        LastCheckpoint(out / LAST_CHECKPOINT, minutes),
    ]


def train_backbone(trainer: Trainer, module: BackboneModule, datamodule: LightningDataModule, out: Path) -> Path:
    """Train, or go on with a training that was killed, until the trainer's `max_epochs`.

    A resumed training ends with the weights of one that was never interrupted, provided that the batches are
    functions of seed, epoch and position, as `BackboneDataModule`'s are: training itself draws no random numbers.

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


def _backbone_of(module: LightningModule) -> Backbone:
    if not isinstance(module, BackboneModule):
        raise ConfigError(f"only a BackboneModule can be exported as a backbone; got {type(module).__name__}")
    return module.model
