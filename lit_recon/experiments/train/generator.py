"""`train.py generator`: train a generator on public images, and say honestly how good it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jsonargparse import ArgumentParser, Namespace
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.torch import save

from lit_recon.data.sources import Digits, ImageSource
from lit_recon.errors import ConfigError, CorruptFileError, MissingDataError
from lit_recon.experiments.call import Call, PaperRunSettings, check_range
from lit_recon.experiments.configuration import SAME_RUN, settings_parser
from lit_recon.io.files import write_bytes
from lit_recon.models.generative.generator import ConvGenerator, load_generator
from lit_recon.modules.data import BackboneDataModule
from lit_recon.modules.generator import (
    GENERATOR_FILE,
    GeneratorModule,
    GeneratorRecipe,
    check_alone,
    measure_quality,
    train_generator,
)
from lit_recon.modules.loggers import finish
from lit_recon.reporting.images import image_grid
from lit_recon.reporting.pages import Page, Panel, Picture
from lit_recon.reporting.provenance import environment, read_settings
from lit_recon.reporting.record import read_metrics
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.stopwatch import Stopwatch
from lit_recon.reporting.wording import MISSING, format_score
from lit_recon.reporting.writing import Scalar, write_metrics
from lit_recon.training.trainer import TrainerSettings, check_trainer, configure_process

#: Inside a run folder: the images of `measure_quality`.
IMAGES_FILE = "samples.safetensors"

_SAMPLES = (
    "Random samples, not selected; below each the training image nearest to it. A sample equal to its neighbor is "
    "memorized."
)
_SEARCH = (
    "Test images, which the generator was not trained on, and the best that it drew of them in one search of {} steps, "
    "which optimized the latent on the image itself. An attack with more steps or restarts may do somewhat better, and "
    "so may one that optimizes the generator's weights, too."
)
#: Rows of the table: distance, key of the generator's metric, key and name of the value to compare it with.
_ROWS = (
    ("Sample to the nearest training image", "sample_nearest_rmse", "held_out_nearest_rmse", "real, held out"),
    ("Between two samples", "sample_spread_rmse", "held_out_spread_rmse", "real, held out"),
    ("Held-out image to its latent search", "search_rmse", "search_mean_image_rmse", "mean image"),
)


@dataclass(frozen=True, kw_only=True)
class GeneratorSettings(PaperRunSettings):
    """One run of `train.py generator`.

    Args:
        seed: seed of weights, of the order of images, of latents and of the samples in the report.
        data: where images come from; the generator is trained on the training split.
        n_train: train on a stratified sample of this many public images; default: all.
        flip: mirror half of the training images; not for digits.
        latent_size: length of a latent.
        width: channels of the generator at full resolution.
        critic_width: channels of critic and encoder at full resolution.
        recipe: training losses, learning rate and weight averaging.
        epochs: over the training images.
        batch_size: training images per step.
        n_shown: number of samples, and of held-out images whose latents are searched for.
        search_steps: optimization steps of that search.
        trainer: devices and precision.
    """

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

    def __post_init__(self) -> None:
        check_range({name: getattr(self, name) for name in ("critic_width", "epochs", "search_steps")}, 1)
        check_range({"n_shown": self.n_shown}, 2)


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    return settings_parser(program, "Train a generator of images on public data.", GeneratorSettings)


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Validate the settings, then train or resume, measure and report."""
    call = Call(arguments, values, "generator")
    settings, folder = call.settings(GeneratorSettings), call.folder
    configure_process(settings.trainer)
    data = BackboneDataModule(
        settings.data, settings.batch_size, settings.flip, 0, settings.flip, settings.n_train, settings.seed
    )
    data.setup("fit")
    if settings.n_shown > len(data.test):
        raise ConfigError(
            f"n_shown must be at most {len(data.test)}, the number of test images; got {settings.n_shown}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        generator = ConvGenerator(data.image_shape, settings.latent_size, settings.width)
    module = GeneratorModule(generator, settings.recipe, settings.critic_width, settings.seed)
    check_alone(check_trainer(settings.trainer).processes)
    RunFolder.open(folder.path, call.config, settings.overwrite, SAME_RUN, more=(GENERATOR_FILE, IMAGES_FILE))
    n_weights = sum(value.numel() for value in module.generator.parameters())
    print(f"data        {data.train.name} ({len(data.train)} images)")
    print(f"generator   {n_weights} weights, {settings.latent_size} latents")
    print(f"run folder  {folder.path}", flush=True)
    exported = folder.path / GENERATOR_FILE
    with Stopwatch(folder) as watch:
        if exported.is_file():  # killed after the training
            checkpoint = load_generator(exported)
            if checkpoint.split_hash != data.split_hash:
                raise ConfigError(
                    f"{exported} was trained on other images (hash {checkpoint.split_hash}, here {data.split_hash}), "
                    "beside which it cannot be measured: the data have changed since; put the former ones back, or "
                    "start again with --overwrite true"
                )
        else:
            loggers = call.loggers()
            checkpoint = train_generator(module, data, settings.epochs, settings.trainer, loggers, folder.path)
            finish(loggers)
        seconds = watch.seconds
    figures, images = measure_quality(
        checkpoint.generator, data.train, data.test, settings.n_shown, settings.search_steps, settings.seed
    )
    write_bytes(folder.path / IMAGES_FILE, save({name: value.contiguous() for name, value in images.items()}))
    facts: dict[str, Scalar] = {
        **figures,
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
        f"held out    RMSE {_rmse(facts, 'search_rmse')} by latent search, "
        f"{_rmse(facts, 'search_mean_image_rmse')} the mean image"
    )
    print(f"generator   {exported}")
    print(f"report      {write_page(folder.path)}")


def write_page(path: Path) -> Path:
    """Write the page of a finished run into its folder; a MissingDataError or CorruptFileError about its files."""
    folder = RunFolder(path)
    if not folder.is_complete:
        raise MissingDataError(f"{path} holds no finished training of a generator: run its command again")
    metrics, settings, file = read_metrics(folder.metrics), read_settings(folder.config), path / IMAGES_FILE
    try:
        images = load_file(file)
        samples = image_grid({"sample": images["samples"], "nearest": images["sample_nearest"]})
        held_out = image_grid({"held out": images["held_out"], "search": images["found"]})
    except (SafetensorError, OSError, KeyError) as error:
        raise CorruptFileError(f"{file} is missing or damaged ({error}): repeat the run") from error
    distances = Panel(
        "Distances",
        f"RMSE of pixels in [0, 1], mean over {metrics.get('n', MISSING)} images.",
        header=["Distance", "Generator", "For comparison"],
        rows=[[words, _rmse(metrics, ours), f"{_rmse(metrics, other)} ({name})"] for words, ours, other, name in _ROWS],
    )
    search = _SEARCH.format(settings.get("search_steps", MISSING))
    page = Page(
        kind="Generator of images",
        settings=settings,
        facts=metrics,
        lead=f"A search over latents reproduces unseen images with an RMSE of {_rmse(metrics, 'search_rmse')} on "
        f"average; the mean image has {_rmse(metrics, 'search_mean_image_rmse')}. The RMSE to the nearest training "
        f"image is {_rmse(metrics, 'sample_nearest_rmse')} for samples and {_rmse(metrics, 'held_out_nearest_rmse')} "
        "for real held-out images.",
        panels=[
            Panel("Samples", _SAMPLES, [Picture(samples, "Samples, and the training images nearest to them")]),
            Panel("Held-out images", search, [Picture(held_out, "Held-out images and the results of the search")]),
            distances,
        ],
        files={
            GENERATOR_FILE: "the generator and fingerprints of its training images",
            "metrics.json": "all metrics",
            IMAGES_FILE: "the images",
            "config.yaml": "the settings",
        },
    )
    return page.write(folder.report)


def _rmse(metrics: Mapping[str, Scalar], key: str) -> str:
    value = metrics.get(key)
    return format_score("rmse", value if isinstance(value, float) else None)
