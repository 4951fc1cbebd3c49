"""The page of a trained generator: what it draws, beside real images that it has not seen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.torch import save
from torch import Tensor

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.io.files import write_bytes, write_text
from lit_recon.reporting.pages import Panel, picture, render
from lit_recon.reporting.plots import image_grid
from lit_recon.reporting.provenance import paper_of
from lit_recon.reporting.record import read_metrics
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.settings import flatten, parse_settings
from lit_recon.reporting.wording import MISSING
from lit_recon.reporting.writing import Scalar

#: Inside a run folder: the images of `lit_recon.modules.generator_training.Quality`.
IMAGES_FILE = "samples.safetensors"

_SAMPLES = (
    "Drawn from random latents, never chosen; below each the training image nearest to it. A sample that equals its "
    "neighbour is memory, not invention."
)
_SEARCH = (
    "Test images, which the generator has not seen, and the best that it can draw of them when latents are searched "
    "for with the image in view. An attack that moves latents alone cannot do better; the rest is left to the weights."
)
#: Rows of the table: what is measured, key of the generator's figure, key and name of what to compare it with.
_ROWS = (
    ("Sample to the nearest training image", "sample_nearest_rmse", "held_out_nearest_rmse", "real, held out"),
    ("Between two samples", "sample_spread_rmse", "held_out_spread_rmse", "real, held out"),
    ("Held-out image to its latent search", "search_rmse", "search_mean_image_rmse", "mean image"),
)


def write_images(folder: RunFolder, images: Mapping[str, Tensor]) -> None:
    """Write what the page shows into the run folder, whole or not at all."""
    write_bytes(folder.path / IMAGES_FILE, save({name: value.contiguous() for name, value in images.items()}))


def write_page(path: Path) -> Path:
    """Write the page of a finished run of `train.py generator` into its folder, from the files in it alone.

    Raises:
        MissingDataError: the folder holds no finished run.
        CorruptFileError: one of its files is malformed.
    """
    folder = RunFolder(path)
    if not folder.is_complete:
        raise MissingDataError(f"{path} holds no finished training of a generator: run its command again")
    settings = parse_settings(folder.config.read_text(encoding="utf-8"), folder.config)
    metrics, images = read_metrics(folder.metrics), _read_images(path / IMAGES_FILE)
    page = render(
        "generator.html.j2",
        name=str(settings.get("name") or path.resolve().name),
        paper=paper_of(settings),
        verdict=_verdict(metrics),
        panels=_panels(metrics, images),
        settings=flatten(settings),
        command=str(metrics.get("command", "")),
        created=str(metrics.get("created", "")),
    )
    write_text(folder.report, page)
    return folder.report


def _verdict(metrics: Mapping[str, Scalar]) -> str:
    found, mean = _figure(metrics, "search_rmse"), _figure(metrics, "search_mean_image_rmse")
    near, real = _figure(metrics, "sample_nearest_rmse"), _figure(metrics, "held_out_nearest_rmse")
    return (
        f"A search for latents draws unseen images with an RMSE of {found} on average, the mean image has {mean}. "
        f"Samples are {near} from the nearest training image, real images that it has not seen {real}."
    )


def _panels(metrics: Mapping[str, Scalar], images: Mapping[str, NDArray[np.float32]]) -> list[Panel]:
    samples = image_grid({"sample": images["samples"], "nearest": images["sample_nearest"]})
    held_out = image_grid({"held out": images["held_out"], "search": images["found"]})
    return [
        Panel("Samples", _SAMPLES, [(picture(samples, "png"), "Samples, and the training images nearest to them")]),
        Panel("Held-out images", _SEARCH, [(picture(held_out, "png"), "Held-out images and what latents give")]),
        Panel(
            "Figures",
            f"RMSE of pixels in [0, 1], mean over {metrics.get('n', MISSING)} images.",
            header=["Distance", "Generator", "To compare"],
            rows=[
                [words, _figure(metrics, ours), f"{_figure(metrics, other)} ({name})"]
                for words, ours, other, name in _ROWS
            ],
        ),
    ]


def _figure(metrics: Mapping[str, Scalar], key: str) -> str:
    value = metrics.get(key)
    return f"{value:.3f}" if isinstance(value, float) else MISSING


def _read_images(path: Path) -> dict[str, NDArray[np.float32]]:
    try:
        images: dict[str, NDArray[np.float32]] = load_file(path)
        return {name: images[name] for name in ("samples", "sample_nearest", "held_out", "found")}
    except (SafetensorError, OSError, KeyError) as error:
        raise CorruptFileError(f"{path} is missing or damaged ({error}): repeat the run") from error
