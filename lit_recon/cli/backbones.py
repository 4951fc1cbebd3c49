"""The model under attack: a checkpoint of the user's, one trained before with the same settings, or one trained now."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from lit_recon.cli.settings import BackboneSettings
from lit_recon.cli.training import Training, prepare_training, training_data
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.models import Backbone, BackboneCheckpoint, load_backbone
from lit_recon.modules.data import SourceDataModule
from lit_recon.modules.loggers import WandbSettings, build_loggers
from lit_recon.modules.trainer import TrainerSettings, is_first_process
from lit_recon.modules.training_callbacks import BACKBONE_FILE, LAST_CHECKPOINT
from lit_recon.modules.utility import Figures, read_utility

#: Settings that say where a model is or how it is built; the built model itself tells the latter.
_NO_TRAINING_SETTING = ("checkpoint", "cache", "trunk", "feature_layer")
#: Settings that are part of a recipe only where they are used.
_OPTIONAL_SETTING = ("defense", "local_steps", "dp")


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
                return _finite(load_backbone(self.path), self.path)
            loggers = build_loggers(folder / "logs", folder.name, WandbSettings(mode="disabled"), {})
            checkpoint = self.training.run(folder, trainer, loggers)
            if is_first_process():
                (folder / LAST_CHECKPOINT).unlink(missing_ok=True)
            return _finite(checkpoint, self.path)

    def utility(self) -> Figures:
        """What the training of the backbone has come to; see `lit_recon.modules.utility`."""
        return read_utility(self.path.parent)


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
    return Target(path, model, checkpoint, None)


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
