"""The victim model: a user's checkpoint or module, or a backbone trained before or now with the same settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from filelock import FileLock
from torch import nn

from lit_recon.clients.gradient import pure_copy
from lit_recon.data import ImageSet
from lit_recon.data.sources import ImageSource
from lit_recon.defenses import Defense
from lit_recon.errors import ConfigError, LitReconError, ShapeError, UnsupportedModelError
from lit_recon.experiments.settings import BackboneSettings, ModelSettings
from lit_recon.models import (
    Backbone,
    BackboneCheckpoint,
    ResNet18,
    build_module,
    load_backbone,
    load_weights,
    public_model,
    save_backbone,
)
from lit_recon.models.classifiers.backbone import trunk_path
from lit_recon.modules.backbone import BackboneModule, DefendedBackboneModule, train_backbone
from lit_recon.modules.data import BackboneDataModule, SourceDataModule
from lit_recon.modules.loggers import WandbSettings, build_loggers
from lit_recon.modules.private import PrivacySettings, PrivateBackboneModule, private_model
from lit_recon.records import Normalization
from lit_recon.reporting.writing import Scalar
from lit_recon.training.module import (
    BACKBONE_FILE,
    LAST_CHECKPOINT,
    TrainingModule,
    training_callbacks,
    without_utility,
    write_utility,
)
from lit_recon.training.progress import TrainingProgress
from lit_recon.training.trainer import Precision, TrainerSettings, build_trainer, check_trainer, is_first_process

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


@dataclass(frozen=True)
class BackboneTraining:
    """A training that has been checked and can begin; 0 epochs leave the model as it is, `notes` are for the user."""

    model: Backbone
    module: TrainingModule
    data: BackboneDataModule
    epochs: int
    validate_every: int = 1
    notes: tuple[str, ...] = ()
    precision: Precision = "32-true"

    def run(self, folder: Path, trainer: TrainerSettings, loggers: Sequence[Logger]) -> BackboneCheckpoint:
        """Train, or resume a killed training, and write `backbone.safetensors` to `folder`."""
        path = folder / BACKBONE_FILE
        names, split_hash = self.data.class_names, self.data.split_hash
        if self.epochs == 0:
            untrained = BackboneCheckpoint(self.model, names, split_hash, epoch=0)
            if is_first_process():
                write_utility(folder, without_utility("an untrained model is not evaluated"))
                save_backbone(path, untrained)
            return untrained
        check_trainer(trainer, self.precision)
        if is_first_process():
            (folder / LAST_CHECKPOINT).parent.mkdir(parents=True, exist_ok=True)
        callbacks = [*training_callbacks(folder, names, split_hash), TrainingProgress()]
        running = build_trainer(trainer, loggers, callbacks, self.epochs, self.validate_every, self.precision)
        train_backbone(running, self.module, self.data, folder)
        running.strategy.barrier("the first process has written the backbone")
        return load_backbone(path)


def prepare_training(
    settings: BackboneSettings,
    source: ImageSource,
    seed: int,
    splits: tuple[ImageSet, ImageSet] | None = None,
    processes: int = 1,
) -> BackboneTraining:
    """Build the model, and refuse settings that do not fit the data or each other; `splits` need not be read again.

    The number of processes, as `check_trainer` gives it, divides the data: the first one may not have started the
    others yet.
    """
    data = BackboneDataModule(
        source, settings.batch_size, settings.augment, settings.padding, settings.flip, settings.n_train, seed
    )
    if splits is not None:
        data.splits = splits
    data.setup("fit")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trunk = (settings.trunk or ResNet18)(data.image_shape)
        layer = settings.feature_layer(trunk.out_features) if settings.feature_layer else None
        model = Backbone(trunk, data.n_classes, data.normalization, layer, settings.head_bias)
    share = len(data.train) // processes
    _check_single_images(settings, model, data, share)
    training = _training(settings, model, data, seed, share)
    training.module.until_loss = settings.until_loss
    return training


def _training(
    settings: BackboneSettings, model: Backbone, data: BackboneDataModule, seed: int, share: int
) -> BackboneTraining:
    """The training that the settings describe, of a model that fits the data, with `share` images in every process."""
    if settings.dp is not None:
        return _private(settings.dp, settings, model, data, seed)
    length = settings.epochs, settings.validate_every
    if settings.defense is None and settings.local_steps is None:
        return BackboneTraining(
            model, BackboneModule(model, settings, seed), data, *length, precision=settings.precision
        )
    _check_batches(settings, data, share)
    module = DefendedBackboneModule(model, settings.defense or Defense(), settings, settings.local_steps, seed)
    steps = f"{settings.local_steps.steps} local steps, " if settings.local_steps is not None else ""
    note = f"defense     {steps}{settings.defense or 'no defense'}"
    return BackboneTraining(model, module, data, *length, (note,), settings.precision)


def _private(
    dp: PrivacySettings, settings: BackboneSettings, model: Backbone, data: BackboneDataModule, seed: int
) -> BackboneTraining:
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
    data.poisson = plan.sampling_rate, plan.steps_per_epoch
    module = PrivateBackboneModule(fitting, plan, settings, seed)
    return BackboneTraining(fitting, module, data, settings.epochs, settings.validate_every, tuple(notes))


def _check_batches(settings: BackboneSettings, data: BackboneDataModule, share: int) -> None:
    n, size = len(data.train), settings.batch_size
    if size > n:
        raise ConfigError(
            f"a client's batch of {size} images is larger than the training set of {n}: the nearest valid batch_size "
            f"is {n}"
        )
    pieces = 1 if settings.local_steps is None else settings.local_steps.batches
    if size % pieces or share % size % pieces:
        raise ConfigError(
            f"local_steps.batches={pieces} must divide every client's batch, here {size} images and {share % size} in "
            f"the last one of an epoch: take multiples of {pieces} for batch_size and n_train"
        )


def _check_single_images(settings: BackboneSettings, model: Backbone, data: BackboneDataModule, share: int) -> None:
    """Refuse batches of one image where a BatchNorm layer needs several; trainings with privacy have no such layer."""
    pieces = 1 if settings.local_steps is None else settings.local_steps.batches
    sizes = min(settings.batch_size, share), share % settings.batch_size
    if settings.epochs == 0 or settings.dp is not None or pieces not in sizes:
        return
    try:
        with torch.no_grad():
            pure_copy(model, "train")(torch.zeros(1, *data.image_shape))
    except UnsupportedModelError as error:
        raise ConfigError(
            f"{len(data.train)} training images in batches of {settings.batch_size} leave a batch of one image: "
            f"{error}; or choose n_train or batch_size otherwise"
        ) from error


#: Settings that say where a model is or how it is built; the built model itself tells the latter.
_NO_TRAINING_SETTING = ("checkpoint", "cache", "trunk", "feature_layer", "head_bias", "validate_every")
#: Settings that are part of a recipe only where they are used.
_OPTIONAL_SETTING = ("defense", "local_steps", "dp", "until_loss")


@dataclass(frozen=True)
class ForeignModel:
    """A victim model of another library, described by import path and arguments."""

    model: nn.Module
    description: str


@dataclass(frozen=True)
class VictimModel:
    """The model under attack, and the path of its weights, which is None where they are random.

    Where there is no such file yet, `checkpoint` is None, the model untrained, and `training` will write the file.
    """

    path: Path | None
    model: nn.Module
    checkpoint: BackboneCheckpoint | ForeignModel | None
    training: BackboneTraining | None = None
    other_settings: bool = False  # whether the settings name another network, which was not built

    def trained(self, trainer: TrainerSettings) -> BackboneCheckpoint | ForeignModel:
        """The model, after training where that is needed; only one run at a time trains it."""
        if self.checkpoint is not None:
            return self.checkpoint
        assert self.training is not None
        assert self.path is not None
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        # a process that starts the others itself is alone before it trains, and holds the lock for all
        alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
        with FileLock(folder / ".lock") if alone else nullcontext():
            if alone and self.path.is_file():
                return _finite(load_backbone(self.path), self.path)
            loggers = build_loggers(folder / "logs", folder.name, WandbSettings(mode="disabled"), {})
            checkpoint = self.training.run(folder, trainer, loggers)
            if is_first_process():
                (folder / LAST_CHECKPOINT).unlink(missing_ok=True)
            return _finite(checkpoint, self.path)

    @property
    def is_untrained(self) -> bool:
        """Whether the weights are still to be trained, so that updates of `model` are not those that are attacked."""
        return self.training is not None and self.training.epochs > 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the reader of a report."""
        if self.other_settings and isinstance(self.model, Backbone):
            name = type(self.model.trunk).__name__
            return (f"the model is the {name} in {self.path}: other settings of backbone were not used",)
        if self.path is None or not isinstance(self.checkpoint, ForeignModel):
            return ()
        return (f"it was not checked whether {self.path} was trained on the attacked images, and so memorized them",)

    def announcement(self) -> list[str]:
        """Lines that say which model it is, before the run begins."""
        if isinstance(self.checkpoint, ForeignModel):
            origin = "with random weights" if self.path is None else f"with the weights in {self.path}"
            return [f"model       {self.checkpoint.description} {origin}"]
        assert isinstance(self.model, Backbone)
        name = type(self.model.trunk).__name__
        if self.training is None:
            return [f"backbone    {name} from {self.path}"]
        return [
            f"backbone    {name}, to be trained for {self.training.epochs} epoch(s)",
            f"            kept in {self.path} for later attacks; use your own with --backbone.checkpoint FILE",
        ]

    def facts(self, trained: BackboneCheckpoint | ForeignModel) -> dict[str, Scalar]:
        """Entries of the run's record about the model."""
        if isinstance(trained, ForeignModel):
            return {"model": trained.description, "weights": "random" if self.path is None else str(self.path)}
        return {
            "backbone": str(self.path),
            "backbone_epochs": trained.epoch,
            "backbone_accuracy": trained.accuracy,
        }


def find_target(
    settings: BackboneSettings,
    data: SourceDataModule,
    seed: int,
    foreign: ModelSettings | None = None,
    processes: int = 1,
) -> VictimModel:
    """The victim model that the settings describe; with a class path, `foreign` takes the backbone's place.

    The seed is that of random weights and of the training, `processes` as for `prepare_training`.

    Raises:
        LitReconError: no or a damaged file of weights; or the model is no classifier of such images, classes and split.
    """
    if foreign is not None and foreign.class_path is not None:
        return _foreign(foreign.class_path, foreign, data, seed)
    if settings.checkpoint is not None:
        found = _existing(settings.checkpoint, data)
        return replace(found, other_settings=_is_other(settings, found.model))
    training = prepare_training(settings, data.source, seed, data.splits, processes)
    path = settings.cache / _identity(settings, training, seed, processes) / BACKBONE_FILE
    return _existing(path, data) if path.is_file() else VictimModel(path, training.model, None, training)


def _is_other(settings: BackboneSettings, model: nn.Module) -> bool:
    """Whether the settings name a trunk with other parameters than a backbone has."""
    if settings.trunk is None or not isinstance(model, Backbone):
        return False
    try:
        with torch.random.fork_rng(devices=[]):
            trunk = settings.trunk(model.image_shape)
    except LitReconError:  # a network that does not fit the images
        return True
    named, own = ({name: value.shape for name, value in one.named_parameters()} for one in (trunk, model.trunk))
    return named != own


def _foreign(class_path: str, settings: ModelSettings, data: SourceDataModule, seed: int) -> VictimModel:
    module = build_module(class_path, settings.init_args, seed)
    if settings.weights is not None:
        load_weights(module, settings.weights)
    if settings.image_shape is not None:
        public_model(module, settings.image_shape, settings.normalization)  # before the data are read or fetched
    shape = settings.image_shape or data.image_shape
    if shape != data.image_shape:
        raise ShapeError(
            f"model.image_shape is {shape}, but the images of the dataset are {data.image_shape}: leave it out, or "
            "give data of that shape"
        )
    by_itself = isinstance(getattr(module, "normalization", None), Normalization)
    public = public_model(module, shape, settings.normalization or (None if by_itself else data.normalization))
    if public.n_classes != data.n_classes:
        raise ShapeError(
            f"{class_path} has {public.n_classes} outputs, but the dataset has {data.n_classes} classes: set the "
            "number of outputs in model.init_args (num_classes in torchvision and timm)"
        )
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.init_args.items())
    foreign = ForeignModel(public.model, f"{class_path}({arguments})")
    return VictimModel(settings.weights, public.model, foreign)


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
            f"{path} has {model.n_classes} outputs, but the dataset has {data.n_classes} classes: give the data that "
            "it was trained on, or another checkpoint"
        )
    if checkpoint.split_hash != data.split_hash:
        raise ConfigError(
            f"{path} was trained on other data or another split (hash {checkpoint.split_hash}, here "
            f"{data.split_hash}), so victims may be among its training images: give the data that it was trained on, "
            "or train again"
        )
    return VictimModel(path, model, checkpoint)


def _finite(checkpoint: BackboneCheckpoint, path: Path) -> BackboneCheckpoint:
    """The checkpoint; refused if its training diverged."""
    if all(value.isfinite().all() for value in checkpoint.model.state_dict().values()):
        return checkpoint
    raise ConfigError(
        f"the training of {path} diverged, its weights are not finite: train it with a lower lr or a weaker defense"
    )


def _identity(settings: BackboneSettings, training: BackboneTraining, seed: int, processes: int) -> str:
    """16 hexadecimal digits over everything that determines the weights."""
    layer, trunk = training.model.feature_layer, training.model.trunk
    recipe = {
        name: repr(value) if name in _OPTIONAL_SETTING else value  # the repr has all that is needed to build it again
        for name, value in vars(settings).items()
        if name not in _NO_TRAINING_SETTING and (value is not None or name not in _OPTIONAL_SETTING)
    }
    if settings.until_loss is not None:  # a training ends early only after an epoch with a validation
        recipe["validate_every"] = settings.validate_every
    content = {
        "data": training.data.split_hash,
        "trunk": [trunk_path(type(trunk)).removeprefix("lit_recon.models."), trunk.arguments],
        "feature_layer": None if layer is None else layer.arguments,
        **({} if settings.head_bias else {"head_bias": False}),
        "training": recipe if settings.epochs else None,
        "processes": processes,
        "seed": seed,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
