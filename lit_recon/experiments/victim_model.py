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
from pytorch_lightning import LightningDataModule
from pytorch_lightning.loggers import Logger

from lit_recon.data.sources import ImageSource
from lit_recon.defenses import Defense
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.experiments.settings import BackboneSettings
from lit_recon.models import Backbone, BackboneCheckpoint, ResNet18, load_backbone, save_backbone
from lit_recon.modules.backbone import BackboneModule, DefendedBackboneModule, train_backbone
from lit_recon.modules.data import BackboneDataModule, PoissonDataModule, SourceDataModule
from lit_recon.modules.loggers import WandbSettings, build_loggers
from lit_recon.modules.private import PrivacySettings, PrivateBackboneModule, private_model
from lit_recon.training.callbacks import BACKBONE_FILE, LAST_CHECKPOINT, training_callbacks
from lit_recon.training.module import Figures, SGDSchedule, TrainingModule, read_utility, without_utility, write_utility
from lit_recon.training.progress import TrainingProgress
from lit_recon.training.trainer import TrainerSettings, build_trainer, is_first_process


@dataclass(frozen=True)
class Training:
    """A training that has been checked and can begin.

    Attributes:
        model: untrained, its weights drawn from the seed.
        module: around the model.
        data: what it is trained on.
        batches: how these data are given out.
        epochs: over the data; 0 leaves the model as it is.
        notes: what the user should know before it begins.
    """

    model: Backbone
    module: TrainingModule
    data: BackboneDataModule
    batches: LightningDataModule
    epochs: int
    notes: tuple[str, ...] = ()

    def run(self, folder: Path, trainer: TrainerSettings, loggers: Sequence[Logger]) -> BackboneCheckpoint:
        """Train, or go on with a training that was killed, and leave `backbone.safetensors` in `folder`."""
        path = folder / BACKBONE_FILE
        names, split_hash = self.data.class_names, self.data.split_hash
        if self.epochs == 0:
            if is_first_process():
                write_utility(folder, without_utility("an untrained model is not evaluated"))
                save_backbone(path, BackboneCheckpoint(self.model, names, split_hash, epoch=0))
            return BackboneCheckpoint(self.model, names, split_hash, epoch=0)
        if is_first_process():
            (folder / LAST_CHECKPOINT).parent.mkdir(parents=True, exist_ok=True)
        callbacks = [*training_callbacks(folder, names, split_hash), TrainingProgress()]
        running = build_trainer(trainer, loggers, callbacks, max_epochs=self.epochs)
        train_backbone(running, self.module, self.batches, folder)
        running.strategy.barrier("the first process has written the backbone")
        return load_backbone(path)


def training_data(settings: BackboneSettings, source: ImageSource, seed: int) -> BackboneDataModule:
    """What the backbone is trained on."""
    return BackboneDataModule(
        source, settings.batch_size, settings.augment, settings.padding, settings.flip, settings.n_train, seed
    )


def prepare_training(settings: BackboneSettings, data: BackboneDataModule, seed: int) -> Training:
    """Build the model, and refuse settings that do not fit the data or each other."""
    data.setup("fit")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trunk = (settings.trunk or ResNet18)(data.image_shape)
        layer = settings.feature_layer(trunk.out_features) if settings.feature_layer else None
        model = Backbone(trunk, data.n_classes, data.normalization, layer)
    schedule = SGDSchedule(settings.lr, settings.momentum, settings.weight_decay, settings.decay_every, settings.decay)
    if settings.dp is not None:
        return _private(settings.dp, settings, model, schedule, data, seed)
    if settings.defense is None and settings.local_steps is None:
        return Training(model, BackboneModule(model, schedule), data, data, settings.epochs)
    _check_batches(settings, data)
    defense = settings.defense or Defense()
    module = DefendedBackboneModule(model, defense, schedule, settings.local_steps, seed)
    steps = f"{settings.local_steps.steps} local steps, " if settings.local_steps is not None else ""
    note = f"defense     {steps}{defense if settings.defense is not None else 'no defense'}"
    return Training(model, module, data, data, settings.epochs, (note,))


def _private(
    dp: PrivacySettings,
    settings: BackboneSettings,
    model: Backbone,
    schedule: SGDSchedule,
    data: BackboneDataModule,
    seed: int,
) -> Training:
    fitting, replaced = private_model(model)
    plan = dp.plan(len(data.train), settings.batch_size, max(1, settings.epochs))
    spent = plan.epsilon(plan.steps_per_epoch * settings.epochs)
    noise, rate = f"{plan.noise_multiplier:.4g} x clipping norm {plan.descent.bound:g}", f"{plan.sampling_rate:.3g}"
    notes = [
        f"privacy     noise {noise}, sampling rate {rate}",
        f"            epsilon {spent:.4g} at delta {dp.delta:g} in the end ({dp.neighbors}; {plan.accountant})",
    ]
    if replaced:
        notes.append(f"            GroupNorm in place of {len(replaced)} BatchNorm layers, which mix private images")
    module = PrivateBackboneModule(fitting, plan, schedule, seed)
    batches = PoissonDataModule(data, plan.sampling_rate, plan.steps_per_epoch)
    return Training(fitting, module, data, batches, settings.epochs, tuple(notes))


def _check_batches(settings: BackboneSettings, data: BackboneDataModule) -> None:
    """Refuse batches that clients cannot be given."""
    n, size = len(data.train), settings.batch_size
    if size > n:
        raise ConfigError(
            f"a client's batch of {size} images is larger than the training set of {n}: the nearest valid batch_size "
            f"is {n}"
        )
    pieces = 1 if settings.local_steps is None else settings.local_steps.batches
    share = n // int(os.environ.get("WORLD_SIZE", 1))
    if size % pieces or share % size % pieces:
        raise ConfigError(
            f"local_steps.batches={pieces} must divide every client's batch, here {size} images and {share % size} in "
            f"the last one of an epoch: take multiples of {pieces} for batch_size and n_train"
        )


#: Settings that say where a model is or how it is built; the built model itself tells the latter.
_NO_TRAINING_SETTING = ("checkpoint", "cache", "trunk", "feature_layer")
#: Settings that are part of a recipe only where they are used.
_OPTIONAL_SETTING = ("defense", "local_steps", "dp")


@dataclass(frozen=True)
class VictimModel:
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
                return _finite(load_backbone(self.path), self.path)
            loggers = build_loggers(folder / "logs", folder.name, WandbSettings(mode="disabled"), {})
            checkpoint = self.training.run(folder, trainer, loggers)
            if is_first_process():
                (folder / LAST_CHECKPOINT).unlink(missing_ok=True)
            return _finite(checkpoint, self.path)

    def utility(self) -> Figures:
        """What the training of the backbone has come to; see `lit_recon.training.module`."""
        return read_utility(self.path.parent)


def find_target(settings: BackboneSettings, data: SourceDataModule, seed: int) -> VictimModel:
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
    return _existing(path, data) if path.is_file() else VictimModel(path, training.model, None, training)


def _existing(path: Path, data: SourceDataModule) -> VictimModel:
    checkpoint = _finite(load_backbone(path), path)
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
    return VictimModel(path, model, checkpoint, None)


def _finite(checkpoint: BackboneCheckpoint, path: Path) -> BackboneCheckpoint:
    """The checkpoint, unless its training has diverged: there is nothing to attack then."""
    if all(value.isfinite().all() for value in checkpoint.model.parameters()):
        return checkpoint
    raise ConfigError(
        f"the training of {path} diverged, its weights are no longer numbers: train it with a lower lr or a weaker "
        "defense"
    )


def _identity(settings: BackboneSettings, training: Training, seed: int) -> str:
    """16 hexadecimal digits over all that the weights are a function of."""
    layer = training.model.feature_layer
    recipe = {
        name: value
        for name, value in vars(settings).items()
        if name not in _NO_TRAINING_SETTING and not (name in _OPTIONAL_SETTING and value is None)
    }
    for name in _OPTIONAL_SETTING:
        if name in recipe:
            recipe[name] = repr(recipe[name])  # all that is needed to build it again
    content = {
        "data": training.data.split_hash,
        "trunk": [type(training.model.trunk).__name__, training.model.trunk.arguments],
        "feature_layer": None if layer is None else layer.arguments,
        "training": recipe if settings.epochs else None,
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "seed": seed,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
