"""Images behind smooth activations, from the span of their maps, beside gradient matching for as long.

    python -m benchmarks.smooth --data.root DIR [--cells "gelu/4/1 epoch" ...]

A ResNet-18 with GELU or ELU after 8 steps, or after 10,000 images once. The first attack of
`configs/attack/feature_maps.yaml`, and `geiping2020` with as many iterations as take the same processor time, and its
schedule over these.
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

from benchmarks.certificates import NETWORKS, Attacked, Cell, attacks_of, drawn, summary, trained
from benchmarks.record import Record, Row
from lit_recon.clients import Client
from lit_recon.data import ImageSet, measure_normalization
from lit_recon.data.sources import CIFAR10
from lit_recon.data.splits import Pool, in_pool
from lit_recon.models import Backbone, ResNet18
from lit_recon.records import Knowledge, Normalization

ACTIVATIONS = ("gelu", "elu")
TRAINED = ("8 steps", "1 epoch")
#: Iterations by which the speed of gradient matching is measured.
TRIED = 5


@dataclass(frozen=True)
class Smooth:
    """One row: `draws` batches of a network with an activation, trained as `certificates.NETWORKS` says."""

    activation: str
    trained: str
    batch: int
    draws: int

    @property
    def name(self) -> str:
        return f"{self.activation}/{self.batch}/{self.trained}"


def cells() -> Iterator[Smooth]:
    for activation in ACTIVATIONS:
        for training in TRAINED:
            for batch, draws in ((1, 8), (4, 4)):
                yield Smooth(activation, training, batch, draws)


def network(cell: Smooth, public: ImageSet, normalization: Normalization) -> Backbone:
    """The network of a cell."""
    torch.manual_seed(0)
    model = Backbone(ResNet18(activation=cell.activation), public.n_classes, normalization)
    return trained(model, public, NETWORKS[cell.trained])


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
    known = {cell.name: cell for cell in cells()}
    if wrong := set(arguments.cells or known) - set(known):
        parser.error(f"--cells: no {', '.join(sorted(wrong))}; there are {', '.join(known)}")
    public, test = CIFAR10(root=Path(arguments.root)).load()
    private, normalization = test.subset(in_pool(test, arguments.pool)), measure_normalization(public)
    with Record("smooth", vars(arguments), arguments.pool) as record:
        for name in arguments.cells or known:
            cell = known[name]
            record.measure(vars(cell), partial(measure, network(cell, public, normalization), private, cell))


if __name__ == "__main__":
    main()
