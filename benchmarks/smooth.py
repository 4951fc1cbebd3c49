"""Images behind smooth activations, from the span of their maps, beside gradient matching for as long.

    python -m benchmarks.smooth --data.root DIR [--cells gelu/4 ...]

A ResNet-18 with GELU or ELU after 8 steps. The first attack of `configs/attack/feature_maps.yaml`, and `geiping2020`
with as many iterations as take the same processor time, and its schedule over these.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import lit_recon._torchvision

import torch
from torch import Tensor

from benchmarks.certificates import WRONG, Cell, attacks_of, drawn, trained
from benchmarks.record import Record, Row, spread
from lit_recon.attacks.updates import GradientMatching
from lit_recon.clients import Client
from lit_recon.data import ImageSet, measure_normalization
from lit_recon.data.sources import CIFAR10
from lit_recon.data.splits import Pool, in_pool
from lit_recon.metrics.fidelity import pairwise_mse
from lit_recon.metrics.scores import match
from lit_recon.models import Backbone, ResNet18
from lit_recon.records import Knowledge, Observation

ACTIVATIONS = ("gelu", "elu")
#: Iterations by which the speed of gradient matching is measured.
TRIED = 5


@dataclass(frozen=True)
class Smooth:
    """One row: `draws` batches of a network with an activation."""

    activation: str
    batch: int
    draws: int

    @property
    def name(self) -> str:
        return f"{self.activation}/{self.batch}"


def cells() -> Iterator[Smooth]:
    for activation in ACTIVATIONS:
        for batch, draws in ((1, 8), (4, 4)):
            yield Smooth(activation, batch, draws)


def attacked(attack: GradientMatching, seen: Observation, images: Tensor) -> tuple[list[float], list[bool], float]:
    """Errors by image, whether each is certified, and seconds of processor time."""
    started = time.process_time()
    [found] = attack.begin([seen]).finish()
    seconds = time.process_time() - started
    order = match(found.images, images)
    errors = pairwise_mse(images, found.images[order]).diagonal().sqrt()
    sure = torch.zeros(len(errors), dtype=torch.bool) if found.certified is None else found.certified[order]
    return [float(f"{value:.3g}") for value in errors.tolist()], sure.tolist(), seconds


def measure(model: Backbone, private: ImageSet, cell: Smooth) -> Row:
    """Errors of both attacks, certified images, wrong ones among those, and seconds."""
    ours, [theirs] = attacks_of("feature_maps")[0], attacks_of("geiping2020")
    rmse: list[float] = []
    other: list[float] = []
    sure: list[bool] = []
    seconds, steps = [], []
    draws = drawn(private.labels, Cell(f"smooth {cell.activation}", cell.batch, "eval", "distinct", cell.draws))
    for ids in draws:
        images, labels = private.pixels(ids), private.labels[ids]
        seen = Client(model).observe(images, labels, Knowledge())
        errors, certified, took = attacked(ours, seen, images)
        theirs.steps, theirs.restarts = TRIED, 1
        pace = attacked(theirs, seen, images)[2] / TRIED
        theirs.steps = max(TRIED, round(took / pace))
        rmse += errors
        sure += certified
        other += attacked(theirs, seen, images)[0]
        seconds.append(took)
        steps.append(theirs.steps)
    wrong = sum(value > WRONG for value, known in zip(rmse, sure, strict=True) if known)
    return {
        "images": cell.batch * cell.draws,
        "rmse": rmse,
        "rmse_geiping2020": other,
        "certified": sum(sure),
        "certified_and_wrong": wrong,
        "seconds": spread(seconds),
        "iterations_geiping2020": steps,
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.root", dest="root", required=True, help="folder of CIFAR-10")
    parser.add_argument("--cells", nargs="+", help="names as in the example above; default: all")
    parser.add_argument("--pool", choices=get_args(Pool), default="evaluation", help="of the attacked images")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    public, test = CIFAR10(root=Path(arguments.root)).load()
    private, normalization = test.subset(in_pool(test, arguments.pool)), measure_normalization(public)
    with Record("smooth", vars(arguments), arguments.pool) as record:
        for cell in cells():
            if not arguments.cells or cell.name in arguments.cells:
                torch.manual_seed(0)
                model = Backbone(ResNet18(activation=cell.activation), public.n_classes, normalization)
                record.measure(vars(cell), partial(measure, trained(model, public, {"steps": 8}), private, cell))


if __name__ == "__main__":
    main()
