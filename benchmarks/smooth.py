"""Images behind smooth activations, from the span of their maps, beside gradient matching for as long.

    python -m benchmarks.smooth --data.root DIR [--cells gelu/4 ...]

A ResNet-18 with GELU or ELU after 8 steps. The first attack of `configs/attack/feature_maps.yaml`, and `geiping2020`
with as many iterations as take the same processor time, and its schedule over these.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import lit_recon._torchvision

import torch

from benchmarks.certificates import Attacked, Cell, attacks_of, drawn, summary, trained
from benchmarks.record import Record, Row
from lit_recon.clients import Client
from lit_recon.data import ImageSet, measure_normalization
from lit_recon.data.sources import CIFAR10
from lit_recon.data.splits import Pool, in_pool
from lit_recon.models import Backbone, ResNet18
from lit_recon.records import Knowledge

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


def measure(model: Backbone, private: ImageSet, cell: Smooth) -> Row:
    """The summary of our attack on a cell's batches, and the errors of the other one in the same time."""
    [ours, *_], [theirs] = attacks_of("feature_maps"), attacks_of("geiping2020")
    batches, other, steps = [], [], []
    draws = drawn(private.labels, Cell(f"smooth {cell.activation}", cell.batch, "eval", "distinct", cell.draws))
    for ids in draws:
        images = private.pixels(ids)
        seen = Client(model).observe(images, private.labels[ids], Knowledge())
        batches.append(Attacked.by(ours, seen, images))
        theirs.steps, theirs.restarts = TRIED, 1
        pace = Attacked.by(theirs, seen, images).seconds / TRIED
        theirs.steps = max(TRIED, round(batches[-1].seconds / pace))
        other.append(Attacked.by(theirs, seen, images))
        steps.append(theirs.steps)
    return {
        "images": cell.batch * cell.draws,
        **summary(batches),
        "rmse_geiping2020": summary(other)["rmse"],
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
