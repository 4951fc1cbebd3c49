"""`train.py generator`: train a generator on public images, and say honestly how good it is."""

from __future__ import annotations

import time
from pathlib import Path

import lit_recon._torchvision

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_recon.cli.configuration import SAME_RUN, instantiated, resolved, settings_of, settings_parser
from lit_recon.cli.generator_page import IMAGES_FILE, write_images, write_page
from lit_recon.cli.generator_settings import GeneratorSettings
from lit_recon.errors import ConfigError
from lit_recon.models.generator import ConvGenerator
from lit_recon.models.generator_checkpoint import GeneratorCheckpoint, load_generator
from lit_recon.modules.data import BackboneDataModule
from lit_recon.modules.generator import GeneratorModule
from lit_recon.modules.generator_quality import measure_quality
from lit_recon.modules.generator_training import GENERATOR_FILE, check_alone, train_generator
from lit_recon.modules.loggers import build_loggers, finish
from lit_recon.modules.trainer import build_trainer
from lit_recon.reporting import RunFolder, environment, write_metrics
from lit_recon.reporting.rows import Metric


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    settings = settings_parser(program, "Train a generator of images on public data.")
    settings.add_class_arguments(GeneratorSettings, as_group=False)
    return settings


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Refuse what cannot work, then train, or go on with a training that was killed, and measure."""
    complete, config = resolved(arguments, values, "generator")
    settings = settings_of(GeneratorSettings, instantiated(arguments, complete))
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
    check_alone(build_trainer(settings.trainer, loggers=[]))
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
    facts: dict[str, Metric] = {
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
