"""The model under attack: a checkpoint of the user's, one trained before with the same settings, or one trained now."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import lit_recon._torchvision

import torch
from filelock import FileLock
from pytorch_lightning.loggers import Logger

from lit_recon.cli.settings import BackboneSettings
from lit_recon.data import ImageSource
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models import Backbone, BackboneCheckpoint, ResNet18, load_backbone, save_backbone
from lit_recon.modules.backbone import (
    BACKBONE_FILE,
    LAST_CHECKPOINT,
    BackboneModule,
    train_backbone,
    training_callbacks,
)
from lit_recon.modules.data import BackboneDataModule, SourceDataModule
from lit_recon.modules.loggers import WandbSettings, build_loggers
from lit_recon.modules.progress import TrainingProgress
from lit_recon.modules.trainer import TrainerSettings, build_trainer, is_first_process

#: Settings that say where a model is or how it is built; the built model itself tells the latter.
_NO_TRAINING_SETTING = ("checkpoint", "cache", "trunk", "feature_layer")


@dataclass(frozen=True)
class Training:
    """A training that has been checked and can begin.

    Attributes:
        model: untrained, its weights drawn from the seed.
        module: around the model.
        data: what it is trained on.
        epochs: over the data; 0 leaves the model as it is.
    """

    model: Backbone
    module: BackboneModule
    data: BackboneDataModule
    epochs: int

    def run(self, folder: Path, trainer: TrainerSettings, loggers: Sequence[Logger]) -> BackboneCheckpoint:
        """Train, or go on with a training that was killed, and leave `backbone.safetensors` in `folder`."""
        path = folder / BACKBONE_FILE
        names, split_hash = self.data.class_names, self.data.split_hash
        if self.epochs == 0:
            if is_first_process():
                save_backbone(path, BackboneCheckpoint(self.model, names, split_hash, epoch=0))
            return BackboneCheckpoint(self.model, names, split_hash, epoch=0)
        if is_first_process():
            (folder / LAST_CHECKPOINT).parent.mkdir(parents=True, exist_ok=True)
        callbacks = [*training_callbacks(folder, names, split_hash), TrainingProgress()]
        running = build_trainer(trainer, loggers, callbacks, max_epochs=self.epochs)
        train_backbone(running, self.module, self.data, folder)
        running.strategy.barrier("the first process has written the backbone")
        return load_backbone(path)


def training_data(settings: BackboneSettings, source: ImageSource, seed: int) -> BackboneDataModule:
    """What the backbone is trained on."""
    return BackboneDataModule(
        source, settings.batch_size, settings.augment, settings.padding, settings.flip, settings.n_train, seed
    )


def prepare_training(settings: BackboneSettings, data: BackboneDataModule, seed: int) -> Training:
    """Build the model, and refuse settings that do not fit the data."""
    data.setup("fit")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trunk = (settings.trunk or ResNet18)(data.image_shape)
        layer = settings.feature_layer(trunk.out_features) if settings.feature_layer else None
        model = Backbone(trunk, data.n_classes, data.normalization, layer)
    module = BackboneModule(
        model, settings.lr, settings.momentum, settings.weight_decay, settings.decay_every, settings.decay
    )
    return Training(model, module, data, settings.epochs)


@dataclass(frozen=True)
class Target:
    """The model under attack, perhaps still to be trained.

    Attributes:
        path: of its file.
        model: for a look at its structure; trained only if `checkpoint` is there.
        checkpoint: what the file holds, if it exists.
        training: what will make the file, if it does not.
    """

    path: Path
    model: Backbone
    checkpoint: BackboneCheckpoint | None
    training: Training | None

    def trained(self, trainer: TrainerSettings) -> BackboneCheckpoint:
        """The model, after training where that is needed; only one run at a time trains it."""
        if self.checkpoint is not None or self.training is None:
            return self.checkpoint or load_backbone(self.path)
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
        with FileLock(folder / ".lock") if alone else nullcontext():
            if alone and self.path.is_file():
                return load_backbone(self.path)
            loggers = build_loggers(folder / "logs", folder.name, WandbSettings(mode="disabled"), {})
            checkpoint = self.training.run(folder, trainer, loggers)
            if is_first_process():
                (folder / LAST_CHECKPOINT).unlink(missing_ok=True)
            return checkpoint


def find_target(settings: BackboneSettings, data: SourceDataModule, seed: int) -> Target:
    """The model that `settings` mean, checked against the data whose victims it is to give away.

    Raises:
        MissingDataError, CorruptFileError: about the checkpoint.
        ShapeError, ConfigError: the checkpoint belongs to other images, classes or splits.
    """
    if settings.checkpoint is not None:
        return _existing(settings.checkpoint, data)
    own = training_data(settings, data.source, seed)
    own.splits = data.splits  # they need not be read twice
    training = prepare_training(settings, own, seed)
    path = settings.cache / _identity(settings, training, seed) / BACKBONE_FILE
    return _existing(path, data) if path.is_file() else Target(path, training.model, None, training)


def _existing(path: Path, data: SourceDataModule) -> Target:
    checkpoint = load_backbone(path)
    model = checkpoint.model
    if model.image_shape != data.image_shape:
        raise ShapeError(
            f"{path} takes images {model.image_shape}, but the data are {data.image_shape}: give the data that it was "
            "trained on, or another checkpoint"
        )
    if model.n_classes != data.n_classes:
        raise ShapeError(
            f"{path} tells {model.n_classes} classes apart, but the data have {data.n_classes}: labels would be out of "
            "range; give the data that it was trained on, or another checkpoint"
        )
    if checkpoint.split_hash != data.split_hash:
        raise ConfigError(
            f"{path} was trained on other data or another split (hash {checkpoint.split_hash}, here "
            f"{data.split_hash}), so victims may be among its training images: give the data that it was trained on, "
            "or train again"
        )
    return Target(path, model, checkpoint, None)


def _identity(settings: BackboneSettings, training: Training, seed: int) -> str:
    """16 hexadecimal digits over all that the weights are a function of."""
    layer = training.model.feature_layer
    recipe = {name: value for name, value in vars(settings).items() if name not in _NO_TRAINING_SETTING}
    content = {
        "data": training.data.split_hash,
        "trunk": [type(training.model.trunk).__name__, training.model.trunk.arguments],
        "feature_layer": None if layer is None else layer.arguments,
        "training": recipe if settings.epochs else None,
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "seed": seed,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
