"""A training of a generator that survives a kill and leaves one file behind."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lit_recon._torchvision

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import Logger
from torch import Tensor, nn

from lit_recon.data.dataset import ImageSet, fingerprints
from lit_recon.data.seeding import seeded_generator
from lit_recon.data.victims import sample_victims
from lit_recon.errors import ConfigError, CorruptFileError
from lit_recon.metrics.baselines import MeanImage, NearestPublic
from lit_recon.metrics.fidelity import pairwise_mse, rmse
from lit_recon.models.generative.generator import (
    ConvGenerator,
    GeneratorCheckpoint,
    draw_samples,
    load_generator,
    save_generator,
)
from lit_recon.modules.data import BackboneDataModule
from lit_recon.modules.generator import GeneratorModule
from lit_recon.training.callbacks import LAST_CHECKPOINT, LastCheckpoint
from lit_recon.training.progress import TrainingProgress
from lit_recon.training.trainer import TrainerSettings, build_trainer

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


def check_alone(processes: int) -> None:
    """Refuse more than one process.

    Raises:
        ConfigError: there are several.
    """
    if processes > 1:
        raise ConfigError(
            f"a generator is trained by one process, as its networks take turns; got {processes}: "
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
    check_alone(trainer.world_size)
    trainer.fit(
        module,
        train_dataloaders=data.train_dataloader(),
        ckpt_path=last if last.exists() else None,
        weights_only=True,
    )
    return load_generator(exported)


#: Learning rate of the search for latents, and the scale of its start: near the mean, from where all are near.
_LR, _START = 0.05, 0.3


@dataclass(frozen=True)
class Quality:
    """Figures, and the images behind them.

    Attributes:
        figures: means over samples or held-out images, RMSE of pixels in [0, 1]:
            `sample_nearest_rmse`, of samples to the nearest training image, beside `held_out_nearest_rmse`, that of
            real images which the generator has not seen: far less would be memorisation, far more no images at all;
            `sample_spread_rmse`, between two samples, beside `held_out_spread_rmse`: far less is a collapse;
            `search_rmse`, of held-out images to what the generator can draw of them, beside
            `search_mean_image_rmse`: the error that a search for latents alone cannot go below.
        images: `(n, c, h, w)` by name: `samples`, `sample_nearest`, `held_out`, `held_out_nearest`, `found`.
    """

    figures: dict[str, float]
    images: dict[str, Tensor]


def measure_quality(
    generator: ConvGenerator, train: ImageSet, test: ImageSet, n: int, search_steps: int, seed: int
) -> Quality:
    """Quality by `n` samples and `n` held-out images.

    Args:
        generator: on the CPU.
        train: what it was trained on.
        test: images that it has not seen; a stratified sample is taken.
        n: at least 2, at most the number of test images.
        search_steps: iterations of the search for latents.
        seed: of samples, of the choice and of the search.
    """
    samples = draw_samples(generator, generator.latent_size, n, seeded_generator(seed, "samples"))
    held_out = test.pixels(sample_victims(test.labels, n, seed))
    found = search_latents(generator, held_out, search_steps, seed)
    public = NearestPublic(train.images)
    near_samples, near_held_out = public.query(samples)[1], public.query(held_out)[1]
    mean = MeanImage.from_images(train.images).query(held_out)
    figures = {
        "sample_nearest_rmse": _mean(rmse(samples, near_samples)),
        "held_out_nearest_rmse": _mean(rmse(held_out, near_held_out)),
        "sample_spread_rmse": _spread(samples),
        "held_out_spread_rmse": _spread(held_out),
        "search_rmse": _mean(rmse(found, held_out)),
        "search_mean_image_rmse": _mean(rmse(mean, held_out)),
    }
    images = {
        "samples": samples,
        "sample_nearest": near_samples,
        "held_out": held_out,
        "held_out_nearest": near_held_out,
        "found": found,
    }
    return Quality(figures, images)


def search_latents(generator: ConvGenerator, images: Tensor, steps: int, seed: int) -> Tensor:
    """What a generator can draw of images `(n, c, h, w)`: the least squared error over latents, by Adam."""
    random = seeded_generator(seed, "search")
    latents = _START * torch.randn(len(images), generator.latent_size, generator=random)
    frozen = {name: value.detach() for name, value in generator.named_parameters()}
    optimizer = torch.optim.Adam([latents.requires_grad_()], lr=_LR)
    for _ in range(steps):
        optimizer.zero_grad()
        drawn = torch.func.functional_call(generator, frozen, (latents,))
        nn.functional.mse_loss(drawn, images, reduction="sum").backward()
        optimizer.step()
    with torch.no_grad():
        found: Tensor = generator(latents)
    return found


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _spread(images: Tensor) -> float:
    """Mean RMSE between two different images."""
    n = len(images)
    between = pairwise_mse(images.double(), images.double()).clamp_min(0).sqrt()
    return float(between.fill_diagonal_(0).sum() / (n * (n - 1)))
