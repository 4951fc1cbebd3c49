"""The base LightningModule of classifier trainings: learning rates, evaluation, and the final utility."""

from __future__ import annotations

import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lit_recon._torchvision

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint
from torch import Tensor, nn, optim
from torch.nn.modules.dropout import _DropoutNd
from torchmetrics import MeanMetric, SumMetric

from lit_recon.data.dataset import seeded_generator
from lit_recon.errors import ConfigError, CorruptFileError
from lit_recon.io.files import parse_json, write_text
from lit_recon.io.tensors import load_saved
from lit_recon.models import Backbone, BackboneCheckpoint, save_backbone

#: Names inside a run folder.
UTILITY_FILE = "utility.json"
BACKBONE_FILE = "backbone.safetensors"
LAST_CHECKPOINT = "checkpoints/last.ckpt"

#: Flat metrics and facts; None has a reason under the same name with `_reason`.
Metrics = dict[str, str | float | None]

_NAMES = ("final_train_loss", "test_loss", "accuracy")


def utility_metrics(train_loss: float, test_loss: float, accuracy: float, diverged_at: int | None) -> Metrics:
    """Metrics of an epoch, unless the loss was no longer finite after step `diverged_at`.

    The training loss is that of the original batches, before any defense; the others are those of the test split.

    >>> utility_metrics(0.5, 0.6, 0.9, None)
    {'final_train_loss': 0.5, 'test_loss': 0.6, 'accuracy': 0.9}
    """
    if diverged_at is not None:
        return without_utility(f"the training diverged: its loss was no longer finite after step {diverged_at}")
    metrics: Metrics = {}
    for name, value in zip(_NAMES, (train_loss, test_loss, accuracy), strict=True):
        if math.isfinite(value):
            metrics[name] = value
        else:
            metrics[name], metrics[f"{name}_reason"] = None, "no example was drawn in the last epoch"
    return metrics


def without_utility(reason: str) -> Metrics:
    """Utility that was not measured, with the reason."""
    return dict.fromkeys(_NAMES) | {f"{name}_reason": reason for name in _NAMES}


def write_utility(folder: Path, metrics: Metrics) -> None:
    """Write `utility.json` into a run folder, atomically."""
    write_text(folder / UTILITY_FILE, json.dumps(metrics, indent=2, allow_nan=False) + "\n")


def read_utility(folder: Path) -> Metrics:
    """The utility in a run folder; without the file, none and the reason. CorruptFileError for a damaged file."""
    path = folder / UTILITY_FILE
    if not path.is_file():
        return without_utility(f"{path} is missing: an earlier release trained this backbone")
    try:
        return dict(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{path} is damaged ({error}): train the backbone again") from error


#: Neurons of unit size up to which a head behind a wide feature layer learns at the full rate.
FULL_RATE_NEURONS = 64
#: Steps between two looks at whether the loss is still finite; reading it makes a GPU wait.
_DIVERGENCE_EVERY = 50

ImageBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class SGDSchedule:
    """SGD with a stepwise decaying rate; ConfigError for a value out of its range.

    Args:
        lr: initial learning rate of SGD.
        momentum: momentum of SGD, in [0, 1).
        weight_decay: L2 penalty, at least 0.
        decay_every: epochs between two decays of the learning rate.
        decay: factor of each decay.

    Source: [Liu2025], appendix F, but for the weight decay, which it does not give.
    """

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    decay_every: int = 50
    decay: float = 0.1

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.decay <= 0 or self.decay_every < 1:
            raise ConfigError(f"lr and decay must be above 0 and decay_every at least 1 epoch; got {self}")
        if not 0 <= self.momentum < 1 or not self.weight_decay >= 0:
            raise ConfigError(f"momentum must lie in [0, 1) and weight_decay be at least 0; got {self}")


def is_validated(trainer: Trainer) -> bool:
    """Whether the present epoch ends with a validation."""
    return (trainer.current_epoch + 1) % (trainer.check_val_every_n_epoch or 1) == 0


class TrainingModule(LightningModule, ABC):
    """Cross-entropy training; subclasses define the gradient of a step.

    Logs `train_loss_step`, `train_loss_epoch`, `test_loss` and `test_accuracy`. A training whose loss is no longer
    finite stops within 50 steps; `utility`, which holds `utility_metrics` and `guarantee` of the last epoch, says so.

    A training ends early after an epoch with a validation whose mean training loss is at most `until_loss`.

    The head behind a wide feature layer of m random neurons, which are not trained, learns at the rate `lr * 64 / m`:
    one step changes a logit in proportion to m times the rate, and at the full rate the loss would grow.

    What layers of dropout drop is a function of seed, step and process. For them PyTorch's global generator is seeded
    in every step.
    """

    def __init__(self, model: Backbone, schedule: SGDSchedule | None = None, seed: int = 0) -> None:
        super().__init__()
        self.model, self.seed = model, seed
        self.schedule = schedule or SGDSchedule()
        # Lightning's own mean is off where processes hold unequal shares of the split, and forgets the first part of an
        # epoch that was interrupted; MeanMetric forgets weights.
        self.train_loss, self.n_trained = SumMetric(nan_strategy="disable"), SumMetric()
        self.train_loss.persistent(True)
        self.n_trained.persistent(True)
        self.test_loss, self.test_accuracy = MeanMetric(nan_strategy="disable"), MeanMetric()
        self.until_loss: float | None = None
        self.utility: Metrics = {}
        self._diverged_at: int | None = None
        self._newest_loss = torch.zeros(())

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, k)` of images `(n, c, h, w)` in [0, 1]."""
        logits: Tensor = self.model(images)
        return logits

    @abstractmethod
    def training_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        """Mean cross-entropy of a batch, passed to `record_loss`."""

    def guarantee(self) -> Metrics:
        """Further facts about the training, such as epsilon, after every epoch; none by default."""
        return {}

    def record_loss(self, loss: Tensor, n: int) -> None:
        """Count the mean loss of this process' `n` examples, and log that of all processes."""
        sums = torch.stack([loss.detach() * n, loss.new_tensor(float(n))])
        total, count = self.trainer.strategy.reduce(sums, reduce_op="sum").unbind()
        self._newest_loss = total / count.clamp_min(1)
        self.train_loss.update(total)
        self.n_trained.update(count)
        self.log("train_loss_step", self._newest_loss, on_step=True, on_epoch=False, prog_bar=True)

    def on_train_start(self) -> None:
        self.trainer.should_stop = self._diverged_at is not None or self._has_reached_loss()

    def on_train_batch_start(self, batch: ImageBatch, batch_idx: int) -> None:
        if any(isinstance(layer, _DropoutNd) and layer.training and layer.p for layer in self.model.modules()):
            purpose = "dropout", self.trainer.global_step, self.trainer.global_rank
            torch.manual_seed(seeded_generator(self.seed, *purpose).initial_seed())

    def on_train_batch_end(self, outputs: Any, batch: ImageBatch, batch_idx: int) -> None:
        if self.trainer.is_last_batch or batch_idx % _DIVERGENCE_EVERY == 0:
            self._stop_unless_finite(self._newest_loss)  # the same in all processes

    def _stop_unless_finite(self, loss: Tensor | float) -> None:
        if self._diverged_at is None and not math.isfinite(loss):
            self._diverged_at = self.trainer.global_step
            self.trainer.should_stop = True

    def on_train_epoch_end(self) -> None:
        """Record the utility of an epoch with a validation; Lightning calls this after it."""
        loss = float(self.train_loss.compute() / self.n_trained.compute())
        self.train_loss.reset()
        self.n_trained.reset()
        said = self.guarantee()
        numbers = {name: value for name, value in said.items() if isinstance(value, float)}
        self.log_dict({"train_loss_epoch": loss, **numbers}, sync_dist=True)  # the same everywhere
        if not is_validated(self.trainer) and self._diverged_at is None:
            return
        seen = self.trainer.callback_metrics
        test_loss, accuracy = (float(seen.get(name, math.nan)) for name in ("test_loss", "test_accuracy"))
        self._stop_unless_finite(test_loss)
        self.utility = {**utility_metrics(loss, test_loss, accuracy, self._diverged_at), **said}
        self.trainer.should_stop |= self._has_reached_loss()

    def _has_reached_loss(self) -> bool:
        loss = self.utility.get("final_train_loss")
        return isinstance(loss, float) and self.until_loss is not None and loss <= self.until_loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the utility: a run that was killed after its last epoch is not evaluated again."""
        checkpoint["utility"], checkpoint["diverged_at"] = dict(self.utility), self._diverged_at

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        self.utility, self._diverged_at = dict(checkpoint["utility"]), checkpoint["diverged_at"]

    def validation_step(self, batch: ImageBatch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.test_loss.update(nn.functional.cross_entropy(logits, labels, reduction="none"))
        self.test_accuracy.update((logits.argmax(dim=1) == labels).float())
        self.log_dict({"test_loss": self.test_loss, "test_accuracy": self.test_accuracy}, prog_bar=True)

    def test_step(self, batch: ImageBatch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def configure_optimizers(self) -> tuple[list[optim.Optimizer], list[optim.lr_scheduler.LRScheduler]]:
        schedule, layer, head = self.schedule, self.model.feature_layer, list(self.model.head.parameters())
        others = [
            parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and not name.startswith("head.")
        ]
        head_lr = schedule.lr if layer is None else schedule.lr * min(1.0, FULL_RATE_NEURONS / layer.n_neurons)
        groups = [{"params": others, "lr": schedule.lr}, {"params": head, "lr": head_lr}]
        optimizer = optim.SGD(groups, lr=schedule.lr, momentum=schedule.momentum, weight_decay=schedule.weight_decay)
        return [optimizer], [optim.lr_scheduler.StepLR(optimizer, schedule.decay_every, schedule.decay)]


class LastCheckpoint(Checkpoint):
    """Keeps the newest state of training in one file, replaced atomically, after validations and every few minutes.

    Going on within an epoch needs a data loader with a state. A kill could leave half the file of Lightning's own
    ModelCheckpoint, which copies it from the temporary folder. With the `split_hash` of the data a state of a training
    on other data is refused by a ConfigError, and so is one of another number of processes: each has a share of every
    epoch's images and batches of its own.
    """

    def __init__(self, path: Path, minutes: float = 5.0, split_hash: str = "") -> None:
        self.path, self.minutes, self.split_hash = path, minutes, split_hash
        self._saved_at = time.monotonic()
        self.processes = 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.processes = trainer.world_size

    def state_dict(self) -> dict[str, Any]:
        return {"split_hash": self.split_hash, "processes": self.processes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # states of earlier releases do not tell
        if (processes := state_dict.get("processes", self.processes)) != self.processes:
            raise ConfigError(
                f"{self.path} is of a training in {processes} processes, here in {self.processes}, which would divide "
                f"its epochs and steps otherwise: start {processes}, or delete {self.path} to start over"
            )
        if (before := state_dict["split_hash"]) != self.split_hash:
            raise ConfigError(
                f"{self.path} is of a training on other data (hash {before}, here {self.split_hash}), of which a file "
                f"has changed since: put the former data back, or delete {self.path} to start over"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        due = time.monotonic() - self._saved_at > 60 * self.minutes
        if not trainer.is_last_batch and trainer.strategy.broadcast(due):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        due = time.monotonic() - self._saved_at > 60 * self.minutes
        if is_validated(trainer) or trainer.should_stop or trainer.strategy.broadcast(due):
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        part = self.path.with_name(f"{self.path.name}.part")
        try:
            trainer.save_checkpoint(part, weights_only=False)
            if trainer.is_global_zero:
                with part.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(part, self.path)
        except OSError as error:  # Lightning's names a file in the temporary folder
            part.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._saved_at = time.monotonic()


def state_to_resume(path: Path) -> Path | None:
    """The state that `LastCheckpoint` has left at `path`, None where there is none; a damaged one is refused."""
    if not path.exists():
        return None
    try:
        content = load_saved(path)
        if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
            raise ValueError("it holds no weights")
    except Exception as error:  # damaged bytes raise errors of many kinds
        reason = " ".join(str(error).split())[:200]
        raise CorruptFileError(
            f"{path} is truncated or not a training state ({reason}): delete it to start over"
        ) from error
    return path


class ExportBackbone(Callback):
    """Writes the utility of the trained backbone, then the backbone, when training has ended."""

    def __init__(self, out: Path, class_names: list[str], split_hash: str) -> None:
        self.out, self.class_names, self.split_hash = out, class_names, split_hash

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, TrainingModule):
            raise ConfigError(f"only a TrainingModule can be exported as a backbone; got {type(pl_module).__name__}")
        if not trainer.is_global_zero:
            return
        write_utility(self.out, pl_module.utility)
        accuracy = pl_module.utility.get("accuracy")
        known = accuracy if isinstance(accuracy, float) else None
        facts = self.class_names, self.split_hash, trainer.current_epoch, known
        save_backbone(self.out / BACKBONE_FILE, BackboneCheckpoint(pl_module.model, *facts))


def training_callbacks(out: Path, class_names: list[str], split_hash: str, minutes: float = 5.0) -> list[Callback]:
    """Callbacks for `train_backbone`, which keep a resumable state and the backbone in the run folder `out`."""
    return [ExportBackbone(out, class_names, split_hash), LastCheckpoint(out / LAST_CHECKPOINT, minutes, split_hash)]
