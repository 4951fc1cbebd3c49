"""How many images the attack on feature maps certifies, and whether any of them is wrong.

    python -m benchmarks.certificates --data.root DIR [--networks "1 epoch" ...] [--cells untrained/4/eval/distinct ...]

Networks from untrained to trained for 20 epochs, batches of 1 to 8, labels distinct and as drawn, both BatchNorm modes.
Every cell has its own draws of test images of CIFAR-10; the networks are trained here, on training images. Small and
large batches of each network have records of their own, so that several processes can share the work.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import lit_recon._torchvision

import torch
import yaml
from jsonargparse import ArgumentParser
from torch import Tensor

from benchmarks.record import ROOT, Record, Row, spread
from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates import GradientMatching
from lit_recon.clients import Client
from lit_recon.data import ImageSet, measure_normalization, sample_victims, victim_batches
from lit_recon.data.dataset import seeded_generator
from lit_recon.data.sources import CIFAR10
from lit_recon.data.splits import Pool, in_pool
from lit_recon.errors import UnsupportedModelError
from lit_recon.metrics.fidelity import pairwise_mse
from lit_recon.metrics.scores import match
from lit_recon.models import Backbone, ConvNet, ResNet18
from lit_recon.records import BatchNormMode, Knowledge, Normalization, Observation, Reconstruction

#: RMSE above which a certified image counts as wrong.
WRONG = 0.05
#: Training images and epochs, or steps; with the width of the ResNet-18.
NETWORKS: dict[str, dict[str, int]] = {
    "untrained": {},
    "8 steps": {"steps": 8},
    "1 epoch": {"images": 10_000, "epochs": 1},
    "20 epochs": {"images": 500, "epochs": 20},
    "ConvNet, 8 steps": {"steps": 8},
    "width 32, 8 steps": {"steps": 8, "width": 32},
}


@dataclass(frozen=True)
class Cell:
    """One row: `draws` batches of a network's updates."""

    network: str
    batch: int
    batch_norm: BatchNormMode
    labels: Literal["distinct", "as drawn"]
    draws: int

    @property
    def name(self) -> str:
        return f"{self.network}/{self.batch}/{self.batch_norm}/{self.labels}"


def cells(network: str, large: bool) -> Iterator[Cell]:
    """The rows of a network with small batches, 1 and 2, or large ones; batches of one have no labels to differ.

    Large batches take up to twenty minutes each: all kinds of them are drawn for one network only.
    """
    if large:
        yield Cell(network, 4, "eval", "distinct", 1)
        if network == "1 epoch":
            yield Cell(network, 4, "eval", "as drawn", 1)
            yield Cell(network, 4, "train", "distinct", 1)
            yield Cell(network, 8, "eval", "distinct", 1)
        return
    for mode in get_args(BatchNormMode):
        yield Cell(network, 1, mode, "as drawn", 24 if mode == "eval" else 10)
        for labels in ("distinct", "as drawn"):
            yield Cell(network, 2, mode, labels, 2 if mode == "eval" else 1)


def network(name: str, public: ImageSet, normalization: Normalization) -> Backbone:
    """A network of the table."""
    setting = NETWORKS[name]
    torch.manual_seed(0)
    trunk = ConvNet(widths=(64, 128, 256, 512)) if "ConvNet" in name else ResNet18(width=setting.get("width", 64))
    return trained(Backbone(trunk, public.n_classes, normalization), public, setting)


def trained(model: Backbone, public: ImageSet, setting: Mapping[str, int]) -> Backbone:
    """The network after `steps`, or `epochs` over `images`: SGD at 0.02, momentum 0.9, batches of 64, not augmented."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(setting.get("epochs", 1)):
        generator = seeded_generator(0, "certificates", epoch)
        order = torch.randperm(setting.get("images", len(public)), generator=generator)
        for step, chosen in enumerate(order.split(64)):
            if step >= setting.get("steps", len(order) if "epochs" in setting else 0):
                break
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(public.pixels(chosen)), public.labels[chosen])
            loss.backward()
            optimizer.step()
    return model.eval()


def attacks_of(name: str) -> list[GradientMatching]:
    """The attack of a setting in `configs/attack`, or the several of which it runs the first applicable one."""
    settings = yaml.safe_load((ROOT / f"configs/attack/{name}.yaml").read_text(encoding="utf-8"))["attack"]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(GradientMatching, "attack")
    attacks: list[GradientMatching] = []
    for one in settings["init_args"].get("attacks", [settings]):
        assert one["class_path"] == GradientMatching.__name__
        built: Any = parser.instantiate(parser.parse_object({"attack": one["init_args"]}))
        attacks.append(built.attack)
    return attacks


def exact_attack() -> Attack:
    """The first attack of `feature_maps.yaml`; what it makes way to is no part of the tables."""
    return attacks_of("feature_maps")[0]


@dataclass(frozen=True)
class Attacked:
    """What an attack found of one batch.

    Attributes:
        rmse: of every image, three digits.
        certified: the images that the attack certifies.
        notes: the attack's, on the batch and its images.
        refused: why the attack does not apply; then `rmse`, `certified` and `notes` are empty.
        seconds: of processor time.
        found: the images and labels themselves, None if refused.
    """

    rmse: list[float]
    certified: list[bool]
    notes: list[str]
    refused: str
    seconds: float
    found: Reconstruction | None = None

    @classmethod
    def by(cls, attack: Attack, seen: Observation, images: Tensor) -> Attacked:
        """Attack an update of `images`, `(n, c, h, w)`."""
        started = time.process_time()
        try:
            [found] = attack.begin([seen]).finish()
        except UnsupportedModelError as error:
            return cls([], [], [], str(error), time.process_time() - started)
        return cls.of(found, images, time.process_time() - started)

    @classmethod
    def of(cls, found: Reconstruction, images: Tensor, seconds: float) -> Attacked:
        """Images found in so many seconds of processor time, matched to the true `images`."""
        order = match(found.images, images)
        rmse = pairwise_mse(images, found.images[order]).diagonal().sqrt()
        sure = torch.zeros(len(rmse), dtype=torch.bool) if found.certified is None else found.certified[order]
        errors = [float(f"{value:.3g}") for value in rmse.tolist()]
        return cls(errors, sure.tolist(), list(found.notes), "", seconds, found)


def summary(batches: Sequence[Attacked]) -> Row:
    """Errors of all images, certified ones, wrong ones among those, notes by batch, refusals, and seconds."""
    rmse = [value for batch in batches for value in batch.rmse]
    sure = [value for batch in batches for value in batch.certified]
    return {
        "rmse": rmse,
        "certified": sum(sure),
        "certified_and_wrong": sum(value > WRONG for value, known in zip(rmse, sure, strict=True) if known),
        "refused": [batch.refused for batch in batches if batch.refused],
        "notes": [batch.notes for batch in batches if not batch.refused],
        "seconds": spread([batch.seconds for batch in batches]),
    }


def measure(model: Backbone, private: ImageSet, attack: Attack, cell: Cell) -> Row:
    """The summary of a cell's batches, errors of certified images apart, and the reasons of the others."""
    batches = []
    reasons: Counter[str] = Counter()
    for ids in drawn(private.labels, cell):
        images = private.pixels(ids)
        seen = Client(model, cell.batch_norm).observe(images, private.labels[ids], Knowledge())
        batches.append(Attacked.by(attack, seen, images))
        reasons.update(kind_of(note) for note in batches[-1].notes if "not certified: " in note)
        if batches[-1].refused:
            reasons["no maps recovered: " + batches[-1].refused.partition(";")[0]] += cell.batch
    row = summary(batches)
    found = [image for batch in batches for image in zip(batch.rmse, batch.certified, strict=True)]
    return {
        "images": cell.batch * cell.draws,
        **{key: row[key] for key in ("certified", "certified_and_wrong")},
        "rmse_of_certified": [value for value, sure in found if sure],
        "rmse_of_others": [value for value, sure in found if not sure],
        "not_certified": dict(reasons),
        "seconds": row["seconds"],
    }


def drawn(labels: Tensor, cell: Cell) -> list[Tensor]:
    """Indices of the images of every draw; no image twice in a cell."""
    n, distinct = cell.batch * cell.draws, cell.labels == "distinct"
    if not distinct:
        generator = seeded_generator(0, cell.name)
        return list(torch.randperm(len(labels), generator=generator)[:n].split(cell.batch))
    seed = seeded_generator(0, cell.name).initial_seed() % 2**31
    return victim_batches(labels, sample_victims(labels, 2 * n + 10, seed), cell.batch, True, seed)[: cell.draws]


def kind_of(note: str) -> str:
    """The reason in a note on one image, without its number and its figures."""
    return note.partition("not certified: ")[2].partition("(")[0].strip()


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.root", dest="root", required=True, help="folder of CIFAR-10")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", choices=("small", "large"), default=["small", "large"])
    parser.add_argument("--cells", nargs="+", help="names as in the example above; default: all")
    parser.add_argument("--pool", choices=get_args(Pool), default="evaluation", help="of the attacked images")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    public, test = CIFAR10(root=Path(arguments.root)).load()
    private = test.subset(in_pool(test, arguments.pool))
    normalization, attack = measure_normalization(public), exact_attack()
    settings = {key: value for key, value in vars(arguments).items() if key not in ("networks", "batches")}
    for large, name in product((kind == "large" for kind in arguments.batches), arguments.networks):
        model = network(name, public, normalization)
        number = list(NETWORKS).index(name) + large * len(NETWORKS)
        with Record(f"certificates_{number}", settings, arguments.pool) as record:
            for cell in cells(name, large):
                if not arguments.cells or cell.name in arguments.cells:
                    record.measure(vars(cell), partial(measure, model, private, attack, cell))


if __name__ == "__main__":
    main()
