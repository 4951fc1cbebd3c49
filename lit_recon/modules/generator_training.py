"""A training of a generator that survives a kill and leaves one file behind."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import lit_recon._torchvision

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import Logger

from lit_recon.data.fingerprints import fingerprints
from lit_recon.errors import ConfigError, CorruptFileError
from lit_recon.models.generator_checkpoint import GeneratorCheckpoint, load_generator, save_generator
from lit_recon.modules.data import BackboneDataModule
from lit_recon.modules.generator import GeneratorModule
from lit_recon.modules.progress import TrainingProgress
from lit_recon.modules.trainer import TrainerSettings, build_trainer
from lit_recon.modules.training_callbacks import LAST_CHECKPOINT, LastCheckpoint

#: Inside a run folder.
GENERATOR_FILE = "generator.safetensors"
#: Minutes between two saves within an epoch.
_SAVE_EVERY = 1.0


class ExportGenerator(Callback):
    """Writes the averaged generator when training has ended.

    Args:
        path: of the file.
        data: that it was trained on.
    """

    def __init__(self, path: Path, data: BackboneDataModule) -> None:
        self.path, self.data = path, data

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        if not isinstance(pl_module, GeneratorModule):
            raise ConfigError(f"only a GeneratorModule can be exported; got {type(pl_module).__name__}")
        name, seen = self.data.train.name, fingerprints(self.data.train)
        averaged = pl_module.averaged.cpu().eval()
        save_generator(
            self.path, GeneratorCheckpoint(averaged, name, self.data.split_hash, seen, trainer.current_epoch)
        )


def check_alone(trainer: Trainer) -> None:
    """Refuse more than one process.

    Raises:
        ConfigError: the trainer has several.
    """
    if trainer.world_size > 1:
        raise ConfigError(
            f"a generator is trained by one process, as its networks take turns; got {trainer.world_size}: "
            "start it without torchrun and with trainer.devices: 1"
        )


def train_generator(
    module: GeneratorModule,
    data: BackboneDataModule,
    epochs: int,
    settings: TrainerSettings,
    loggers: Sequence[Logger],
    out: Path,
) -> GeneratorCheckpoint:
    """Train, or go on with a training that was killed, and leave `generator.safetensors` in `out`.

    A resumed training ends with the weights of one that was never interrupted: batches, latents and noise are functions
    of seed and step.

    Raises:
        ConfigError: more than one process, or the training diverged.
        CorruptFileError: the state of a killed training cannot be read.
    """
    last = out / LAST_CHECKPOINT
    if last.exists() and not zipfile.is_zipfile(last):
        raise CorruptFileError(f"{last} is truncated or not a training state: delete it to start over")
    last.parent.mkdir(parents=True, exist_ok=True)
    exported = out / GENERATOR_FILE
    callbacks = [
        ExportGenerator(exported, data),
        LastCheckpoint(last, _SAVE_EVERY),
        TrainingProgress(module.n_optimizers),
    ]
    trainer = build_trainer(settings, loggers, callbacks, max_epochs=epochs)
    check_alone(trainer)
    trainer.fit(
        module,
        train_dataloaders=data.train_dataloader(),
        ckpt_path=last if last.exists() else None,
        weights_only=True,
    )
    return load_generator(exported)
