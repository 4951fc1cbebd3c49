"""A training of a backbone as its settings describe it (plain, defended or private), checked before it begins."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lit_recon._torchvision

import torch
from pytorch_lightning import LightningDataModule
from pytorch_lightning.loggers import Logger

from lit_recon.cli.settings import BackboneSettings
from lit_recon.data import ImageSource
from lit_recon.defenses import Defense
from lit_recon.errors import ConfigError
from lit_recon.models import Backbone, BackboneCheckpoint, ResNet18, load_backbone, save_backbone
from lit_recon.modules.backbone import BackboneModule, train_backbone
from lit_recon.modules.data import BackboneDataModule
from lit_recon.modules.defended import DefendedBackboneModule
from lit_recon.modules.poisson import PoissonDataModule
from lit_recon.modules.privacy_plan import PrivacySettings
from lit_recon.modules.private import PrivateBackboneModule, private_model
from lit_recon.modules.progress import TrainingProgress
from lit_recon.modules.trainer import TrainerSettings, build_trainer, is_first_process
from lit_recon.modules.training import SGDSchedule, TrainingModule
from lit_recon.modules.training_callbacks import BACKBONE_FILE, LAST_CHECKPOINT, training_callbacks
from lit_recon.modules.utility import without_utility, write_utility


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
    noise, rate = f"{plan.noise_multiplier:.4g} x clipping norm {plan.max_grad_norm:g}", f"{plan.sampling_rate:.3g}"
    notes = [
        f"privacy     noise {noise}, sampling rate {rate}",
        f"            epsilon {spent:.4g} at delta {plan.delta:g} in the end ({plan.neighbors}; {plan.accountant})",
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
