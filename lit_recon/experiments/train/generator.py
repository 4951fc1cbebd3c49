"""`train.py generator`: train a generator on public images, and say honestly how good it is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import lit_recon._torchvision

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.data.sources import Digits, ImageSource
from lit_recon.errors import ConfigError
from lit_recon.experiments.configuration import SAME_RUN, instantiated, resolved, settings_of, settings_parser
from lit_recon.experiments.settings import PaperSettings
from lit_recon.experiments.train.generator_page import IMAGES_FILE, write_images, write_page
from lit_recon.models.generative.generator import ConvGenerator, GeneratorCheckpoint, load_generator
from lit_recon.modules.data import BackboneDataModule
from lit_recon.modules.generator import GeneratorModule, GeneratorRecipe
from lit_recon.modules.generator_training import GENERATOR_FILE, check_alone, measure_quality, train_generator
from lit_recon.modules.loggers import WandbSettings, build_loggers, finish
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import Scalar, write_metrics
from lit_recon.training.trainer import TrainerSettings, check_trainer, configure_process


@dataclass(frozen=True)
class GeneratorSettings:
    """One run of `train.py generator`.

    Args:
        name: of the run; default: the name of its configuration file.
        out: folder for everything that the run leaves behind; default: runs/NAME.
        overwrite: begin anew where a run is already.
        seed: of weights, of the order of images, of latents and of what the report shows.
        data: where images come from; the generator sees nothing of the test split, which victims are drawn from.
        n_train: train on a stratified sample of this many public images; default: all.
        flip: mirror half of the training images; not for digits.
        latent_size: length of a latent.
        width: channels of the generator at full resolution.
        critic_width: channels of critic and encoder at full resolution.
        recipe: what the generator is trained for.
        epochs: over the training images.
        batch_size: training images per step.
        n_shown: samples, and held-out images that latents are searched for, in the report.
        search_steps: of that search.
        trainer: where to compute.
        wandb: Weights & Biases.
        paper: whose setting this is.
    """

    name: str | None = None
    out: Path | None = None
    overwrite: bool = False
    seed: int = 0
    data: ImageSource = field(default_factory=Digits)
    n_train: int | None = None
    flip: bool = False
    latent_size: int = 128
    width: int = 32
    critic_width: int = 32
    recipe: GeneratorRecipe = field(default_factory=GeneratorRecipe)
    epochs: int = 50
    batch_size: int = 64
    n_shown: int = 40
    search_steps: int = 300
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    wandb: WandbSettings = field(default_factory=WandbSettings)
    paper: PaperSettings | None = None

    def __post_init__(self) -> None:
        if min(self.critic_width, self.epochs, self.search_steps) < 1 or self.n_shown < 2:
            raise ConfigError(
                "critic_width, epochs and search_steps must be at least 1 and n_shown at least 2; "
                f"got {self.critic_width}, {self.epochs}, {self.search_steps} and {self.n_shown}"
            )


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Train a generator of images on public data.")
    settings.add_class_arguments(GeneratorSettings, as_group=False)
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Refuse what cannot work, then train, or go on with a training that was killed, and measure."""
    complete, config = resolved(arguments, values, "generator")
    settings = settings_of(GeneratorSettings, instantiated(arguments, complete))
    configure_process(settings.trainer)
    data = BackboneDataModule(
        settings.data, settings.batch_size, settings.flip, 0, settings.flip, settings.n_train, settings.seed
    )
    data.setup("fit")
    if settings.n_shown > len(data.test):
        raise ConfigError(
            f"n_shown must be at most {len(data.test)}, the number of test images; got {settings.n_shown}"
        )
    module = _module(settings, data)
    settings.wandb.resolved_mode()
    check_alone(check_trainer(settings.trainer).processes)
    folder = RunFolder.open(
        Path(complete.out), config, settings.overwrite, SAME_RUN, more=(GENERATOR_FILE, IMAGES_FILE)
    )
    n_weights = sum(value.numel() for value in module.generator.parameters())
    print(f"data        {data.train.name} ({len(data.train)} images)")
    print(f"generator   {n_weights} weights, {settings.latent_size} latents")
    print(f"run folder  {folder.path}", flush=True)
    started = time.perf_counter()
    checkpoint = _trained(settings, module, data, folder, yaml.safe_load(config))
    seconds = time.perf_counter() - started
    quality = measure_quality(
        checkpoint.generator, data.train, data.test, settings.n_shown, settings.search_steps, settings.seed
    )
    write_images(folder, quality.images)
    facts: dict[str, Scalar] = {
        **quality.figures,
        "n": settings.n_shown,
        "n_train": len(data.train),
        "n_weights": n_weights,
        "epochs": checkpoint.epoch,
        "split_hash": checkpoint.split_hash,
        "seed": settings.seed,
        "seconds": seconds,
    }
    write_metrics(folder, {**facts, **environment()})
    print(
        f"held out    RMSE {quality.figures['search_rmse']:.3f} by latent search, "
        f"{quality.figures['search_mean_image_rmse']:.3f} the mean image"
    )
    print(f"generator   {folder.path / GENERATOR_FILE}")
    print(f"report      {write_page(folder.path)}")


def _module(settings: GeneratorSettings, data: BackboneDataModule) -> GeneratorModule:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        generator = ConvGenerator(data.image_shape, settings.latent_size, settings.width)
    return GeneratorModule(generator, settings.recipe, settings.critic_width, settings.seed)


def _trained(
    settings: GeneratorSettings,
    module: GeneratorModule,
    data: BackboneDataModule,
    folder: RunFolder,
    config: dict[str, object],
) -> GeneratorCheckpoint:
    """The generator; that of an earlier process where only its figures are missing."""
    exported = folder.path / GENERATOR_FILE
    if exported.is_file():
        return load_generator(exported)
    loggers = build_loggers(folder.logs, str(settings.name or folder.path.name), settings.wandb, config)
    checkpoint = train_generator(module, data, settings.epochs, settings.trainer, loggers, folder.path)
    finish(loggers)
    return checkpoint
