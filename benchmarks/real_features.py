"""How well features of real images are recovered from the gradient of a wide layer: by method, batch and defense.

    python -m benchmarks.real_features --data.root DIR --checkpoint backbone.safetensors [--sections clean defended ...]
    python -m benchmarks.real_features --data.root DIR --checkpoint backbone.safetensors --sections sources
    python -m benchmarks.real_features --data.root DIR --checkpoint backbone.safetensors --sections searches

The trunk is that of a trained backbone. Behind it stands a wide layer of random neurons, or of random and trained ones,
and a head. A client computes its gradient on images that the backbone was not trained on; labels repeat as they are
drawn unless a section says otherwise. Every cell is measured on several draws of images.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import lit_recon._torchvision

import torch
from torch import Tensor

from benchmarks.record import Record, Row, spread
from benchmarks.workload import read_cifar10
from lit_recon.attacks.updates.features.cocktail_party import CocktailParty
from lit_recon.attacks.updates.features.exact import ExactRecovery
from lit_recon.attacks.updates.features.layer import FeatureRecovery, LayerGradient, RecoveredFeatures
from lit_recon.attacks.updates.features.matching import FeatureMap
from lit_recon.attacks.updates.features.moments import MomentRecovery
from lit_recon.attacks.updates.linear_layer.unmixing import mixtures_of
from lit_recon.clients import ClientSettings, LocalTraining
from lit_recon.data import ImageSet
from lit_recon.data.dataset import seeded_generator
from lit_recon.defenses import Defense, GaussianNoise, GradientClipping, GradientDropout, GradientPruning
from lit_recon.metrics import feature_cosines, span_error
from lit_recon.models import Backbone, WideFeatureLayer
from lit_recon.models.checkpoint import load_backbone
from lit_recon.records import ForwardOperator, Knowledge, Observation

Activation = Literal["gelu", "relu"]


class RandomDirections(FeatureRecovery):
    """Orthonormal vectors drawn in the span of the layer's gradient: what a separation has to beat."""

    def run(self, seen: LayerGradient, operator: ForwardOperator | None) -> RecoveredFeatures:
        mixed = mixtures_of(seen.weight_gradient, None, seen.n_examples).basis
        span = torch.linalg.qr(mixed.T).Q
        drawn = torch.randn(len(mixed), len(mixed), dtype=span.dtype, generator=seeded_generator(0, "directions"))
        return RecoveredFeatures(torch.linalg.qr(drawn).Q @ span.T, span, "random directions")


class RandomStart(CocktailParty):
    """Descent from random orthonormal rows instead of the identity."""

    def _unmixed(self, whitened: Tensor, mean: Tensor) -> Tensor:
        drawn = torch.randn(len(mean), len(mean), dtype=mean.dtype, generator=seeded_generator(0, "start"))
        turn = torch.linalg.qr(drawn).Q
        return super()._unmixed(turn @ whitened, turn @ mean) @ turn


class CenteredWhitening(CocktailParty):
    """Mixtures that are whitened after their mean over entries is subtracted, instead of before."""

    def _sources(self, basis: Tensor) -> Tensor:
        mean = basis.mean(dim=1, keepdim=True)
        left, values, _ = torch.linalg.svd(basis - mean, full_matrices=False)
        whitening = (left / values).T
        return self._unmixed(whitening @ (basis - mean), whitening @ mean) @ whitening @ basis


#: The published weights, as in configs/attack/kariyappa2023_conv.yaml.
PUBLISHED = partial(CocktailParty, decorrelation=5.3, sharpness=7.7, sparsity=5.0, steps=2000)

METHODS: dict[str, FeatureRecovery] = {
    "moments": MomentRecovery(),
    "moments_control_variates": MomentRecovery(control_variates=True),
    "exact": ExactRecovery(),
    "neuron_ica": ExactRecovery(starts=("neurons",)),
    "feature_ica": CocktailParty(),
    "published_ica": PUBLISHED(non_negativity=0.13),
    "published_ica_any_sign": PUBLISHED(),
    "published_ica_tenfold": PUBLISHED(non_negativity=1.3),
    "published_ica_200_steps": PUBLISHED(non_negativity=0.13, steps=200),
    "published_ica_10000_steps": PUBLISHED(non_negativity=0.13, steps=10_000),
    "published_ica_random_start": RandomStart(5.3, 7.7, 0.13, 5.0, steps=2000),
    "published_ica_centered_whitening": CenteredWhitening(5.3, 7.7, 0.13, 5.0, steps=2000),
    "random_directions": RandomDirections(),
    "null_vectors": ExactRecovery(starts=("null_vectors",)),
}
DEFENSES: dict[str, Defense | LocalTraining] = {
    "none": Defense(),
    "prune_0.5": GradientPruning(0.5),
    "prune_0.9": GradientPruning(0.9),
    "prune_0.99": GradientPruning(0.99),
    "drop_0.5": GradientDropout(0.5),
    "drop_0.9": GradientDropout(0.9),
    "clip_4": GradientClipping(4.0),
    "noise_0.001": GaussianNoise(0.001),
    "noise_0.01": GaussianNoise(0.01),
    "noise_0.1": GaussianNoise(0.1),
    "local_steps_3": LocalTraining(steps=3, lr=0.01),
    "local_steps_5": LocalTraining(steps=5, lr=0.01),
}


@dataclass(frozen=True)
class Cell:
    """One row of the table: which layer, which batch, which defense, which draws."""

    activation: Activation
    batch: int
    methods: tuple[str, ...]
    draws: int
    defense: str = "none"
    centered: bool = True
    trained: int = 0
    labels: Literal["drawn", "distinct", "same"] = "drawn"


class Bench:
    """A trained trunk, images to attack, and public images."""

    def __init__(self, trained: Backbone, public: ImageSet, private: ImageSet, neurons: int) -> None:
        self.trained, self.public, self.private, self.neurons = trained, public, private, neurons
        self._models: dict[tuple[Activation, bool, int], Backbone] = {}

    @cached_property
    def features(self) -> Tensor:
        """Of the public images, `(N, d)`."""
        with torch.no_grad():
            pixels = self.public.pixels()
            return torch.cat([self.trained.features(part) for part in pixels.split(100)])

    def model(self, cell: Cell) -> Backbone:
        """The trunk with the cell's layer; a trained block has seen the public images once, the trunk being fixed."""
        key = cell.activation, cell.centered, cell.trained
        if key not in self._models:
            torch.manual_seed(0)
            width = self.trained.trunk.out_features
            layer = WideFeatureLayer(width, self.neurons + cell.trained, cell.trained, cell.activation)
            if cell.centered:
                layer.set_center(self.features)
            model = Backbone(self.trained.trunk, self.trained.n_classes, self.trained.normalization, layer).eval()
            if cell.trained:
                self._train(model, layer)
            self._models[key] = model
        return self._models[key]

    def _train(self, model: Backbone, layer: WideFeatureLayer) -> None:
        tuned = [p for part in (layer, model.head) for p in part.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(tuned, lr=0.02, momentum=0.9)
        order = torch.randperm(len(self.features), generator=seeded_generator(0, "order"))
        for rows in order.split(64):
            optimizer.zero_grad()
            logits = model.head(layer(self.features[rows]))
            torch.nn.functional.cross_entropy(logits, self.public.labels[rows]).backward()
            optimizer.step()

    def images(self, cell: Cell, draw: int) -> tuple[Tensor, Tensor]:
        """Images `(n, c, h, w)` and labels of one draw."""
        generator = seeded_generator(draw, "images", cell.batch)
        labels = self.private.labels
        order = torch.randperm(len(labels), generator=generator)
        if cell.labels == "same":
            order = order[labels[order] == labels[order[0]]]
        if cell.labels == "distinct":
            order = torch.stack([order[labels[order] == c][0] for c in range(cell.batch)])
        chosen = order[: cell.batch]
        return self.private.pixels(chosen), labels[chosen]

    def observe(self, cell: Cell, draw: int) -> tuple[Observation, Tensor]:
        """What the attacker sees, and the true features."""
        images, labels = self.images(cell, draw)
        defense = DEFENSES[cell.defense]
        local = defense if isinstance(defense, LocalTraining) else None
        client = ClientSettings(local_steps=local, seed=draw)
        device = client.client(self.model(cell), defense if isinstance(defense, Defense) else None)
        seen = device.observe(images, labels, Knowledge(labels=False), client.generator(draw))
        return seen, FeatureMap(seen)(images).detach()

    def measure(self, cell: Cell) -> Row:
        """Errors and seconds of every method over the cell's draws."""
        drawn = [self.observe(cell, draw) for draw in range(cell.draws)]
        row: Row = {"n_features": drawn[0][1].shape[1], "methods": {}}
        for name in cell.methods:
            outside, means, worst, certificates, exact, right, seconds = [], [], [], [], [], [], []
            for seen, truth in drawn:
                started = time.process_time()
                found = METHODS[name](seen)
                seconds.append(time.process_time() - started)
                outside.append(float(span_error(found.span.T, truth).mean()))
                cosines = feature_cosines(found.features, truth)
                means.append(float(cosines.mean()))
                worst.append(1 - float(cosines.min()))
                certificates.append(found.certificate)
                exact.append(found.exact)
                right.append(not found.exact or worst[-1] < 1e-4)
            row["methods"][name] = {
                "span_error": _errors(outside),
                "cosine": _errors(means),
                "worst_one_minus_cosine": _errors(worst),
                "certificate": None if None in certificates else _errors([c for c in certificates if c is not None]),
                "certified": sum(exact),
                "certified_and_wrong": len(right) - sum(right),
                "seconds": spread(seconds),
            }
        return row


def _errors(values: list[float]) -> dict[str, float]:
    """Median and extremes over draws in three digits: errors of rounding's size are of interest too."""
    figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.3g}") for name, value in figures.items()} | {"n": len(values)}


def cells(sections: list[str], batches: list[int], draws: int) -> Iterator[Cell]:
    """The rows of the sections."""
    quick = max(1, draws // 3)
    both: tuple[Activation, ...] = ("gelu", "relu")
    if "clean" in sections:
        for activation in both:
            for batch in batches:
                yield Cell(activation, batch, ("exact",), draws)
    if "methods" in sections:
        for activation in both:
            last = ("null_vectors",) if activation == "relu" else ()
            names = ("moments", "moments_control_variates", "neuron_ica", "feature_ica", *last)
            for batch in batches:
                yield Cell(activation, batch, names, quick)
    if "sources" in sections:
        names = ("published_ica", "published_ica_any_sign", "published_ica_tenfold", "random_directions")
        for batch in batches:
            yield Cell("relu", batch, names, draws)
    if "searches" in sections:
        ends = ("", "_200_steps", "_10000_steps", "_random_start", "_centered_whitening")
        for batch in batches:
            yield Cell("relu", batch, tuple(f"published_ica{end}" for end in ends), draws)
    if "variants" in sections:
        for activation in both:
            plain = Cell(activation, 8, ("exact", "moments"), quick)
            yield replace(plain, centered=False)
            yield replace(plain, trained=4096)
            yield replace(plain, labels="distinct")
            yield replace(plain, labels="same")
    if "defended" in sections:
        for name in DEFENSES:
            for batch in (1, 2, 4, 8):
                yield Cell("gelu", batch, ("exact", "moments", "moments_control_variates"), quick, defense=name)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.root", dest="root", required=True, help="folder of CIFAR-10")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a backbone that was trained on CIFAR-10")
    parser.add_argument(
        "--sections",
        nargs="+",
        default=["clean", "methods", "variants", "defended"],
        choices=["clean", "methods", "sources", "searches", "variants", "defended"],
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--neurons", type=int, default=4096)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--public", type=int, default=1000, help="images that center the features and train a block")
    arguments, train, private = read_cifar10(parser)
    public = train.subset(torch.randperm(len(train), generator=seeded_generator(0, "public"))[: arguments.public])
    bench = Bench(load_backbone(arguments.checkpoint).model, public, private, arguments.neurons)
    # a record of its own, since tables read the newest one of a name
    own = arguments.sections in (["sources"], ["searches"])
    with Record(
        f"feature-{arguments.sections[0]}" if own else "real-features", vars(arguments), arguments.pool
    ) as record:
        for cell in cells(arguments.sections, arguments.batches, arguments.draws):
            record.measure(vars(cell), partial(bench.measure, cell))


if __name__ == "__main__":
    main()
