"""How exactly maps of an inner layer are recovered from one gradient: by batch size, BatchNorm mode and defense.

    python -m benchmarks.maps --data.root DIR --checkpoint backbone.safetensors [--sections clean defended]

A client computes its gradient on test images of CIFAR-10, labels as drawn. Every cell is measured on several draws.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import lit_recon._torchvision

import torch
from torch import Tensor

from benchmarks.record import Record, Row, spread
from benchmarks.workload import read_cifar10
from lit_recon.attacks.updates import MapRecovery
from lit_recon.attacks.updates.feature_maps.matching import InputMap
from lit_recon.clients import ClientSettings, LocalTraining
from lit_recon.data import ImageSet
from lit_recon.data.dataset import seeded_generator
from lit_recon.defenses import Defense, GaussianNoise, GradientClipping, GradientDropout, GradientPruning
from lit_recon.errors import UnsupportedModelError
from lit_recon.models import Backbone
from lit_recon.models.checkpoint import load_backbone
from lit_recon.records import Knowledge, Observation

DEFENSES: dict[str, Defense | LocalTraining] = {
    "none": Defense(),
    "clip_1": GradientClipping(1.0),
    "noise_1e-8": GaussianNoise(1e-8),
    "noise_1e-7": GaussianNoise(1e-7),
    "noise_1e-6": GaussianNoise(1e-6),
    "noise_1e-5": GaussianNoise(1e-5),
    "noise_1e-4": GaussianNoise(1e-4),
    "prune_0.01": GradientPruning(0.01),
    "prune_0.3": GradientPruning(0.3),
    "drop_0.01": GradientDropout(0.01),
    "local_steps_2": LocalTraining(steps=2, lr=1e-4),
}


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    batch: int
    batch_norm: Literal["eval", "train"]
    defense: str
    draws: int


def observe(model: Backbone, private: ImageSet, cell: Cell, draw: int) -> tuple[Observation, Tensor]:
    """What the attacker sees of one draw, and the true images."""
    chosen = torch.randperm(len(private.labels), generator=seeded_generator(draw, "maps", cell.batch))[: cell.batch]
    images = private.pixels(chosen)
    defense = DEFENSES[cell.defense]
    local = defense if isinstance(defense, LocalTraining) else None
    client = ClientSettings(batch_norm=cell.batch_norm, local_steps=local, seed=draw)
    device = client.client(model, defense if isinstance(defense, Defense) else None)
    return device.observe(images, private.labels[chosen], Knowledge(), client.generator(draw)), images


def measure(model: Backbone, private: ImageSet, cell: Cell) -> Row:
    """Recoveries, their errors, and false certificates, over the cell's draws."""
    layers, angles, seconds = [], [], []
    for draw in range(cell.draws):
        seen, images = observe(model, private, cell, draw)
        started = time.process_time()
        try:
            found = MapRecovery()(seen)
        except UnsupportedModelError:
            continue
        finally:
            seconds.append(time.process_time() - started)
        with torch.no_grad():
            maps = InputMap(seen, found.convolution.name, cell.batch_norm)(images)
        truth = torch.nn.functional.normalize(maps.double(), dim=1)
        layers.append(found.convolution.name)
        angles.append(1 - float((truth @ found.maps.flatten(1).T).max(dim=1).values.min()))
    worst = {f"{value:.3g}" for value in angles}
    return {
        "recovered": len(angles),
        "certified_and_wrong": sum(angle > 1e-3 for angle in angles),
        "worst_one_minus_cosine": sorted(worst, key=float),
        "layers": sorted(set(layers)),
        "seconds": spread(seconds),
    }


def cells(sections: list[str], draws: int) -> Iterator[Cell]:
    """The rows of the sections."""
    if "clean" in sections:
        for batch in (1, 2, 4, 8, 16, 24):
            for batch_norm in ("eval", "train"):
                yield Cell(batch, batch_norm, "none", draws if batch < 16 else max(1, draws // 3))
    if "defended" in sections:
        for batch in (1, 4):
            for name in DEFENSES:
                if name != "none":
                    yield Cell(batch, "eval", name, max(1, draws // 3))


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.root", dest="root", required=True, help="folder of CIFAR-10")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a ResNet-18 that was trained on CIFAR-10")
    parser.add_argument("--sections", nargs="+", default=["clean", "defended"])
    parser.add_argument("--draws", type=int, default=10)
    arguments, _, private = read_cifar10(parser)
    model = load_backbone(arguments.checkpoint).model
    with Record("maps", vars(arguments), arguments.pool) as record:
        for cell in cells(arguments.sections, arguments.draws):
            record.measure(vars(cell), partial(measure, model, private, cell))


if __name__ == "__main__":
    main()
