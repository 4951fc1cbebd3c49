"""How many inputs of an inner linear layer are found from one update, by the size of the batch.

    python -m benchmarks.inputs --root DIR [--batches 8 16 24 32 40] [--draws 3]

Images of CIFAR-10 behind the small convolutional network of Flower's quickstart, with random weights: two convolutions
with 6 and 16 channels of 5x5, pooling, linear layers of 400, 120, 84 and 10. The update is the gradient, or new weights
in single precision after one step at the rate 0.01. An input counts as wrong if it differs from every true one by more
than 5 % of its length.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial

import lit_recon._torchvision

import torch
from torch import Tensor, nn

from benchmarks.record import Record, Row
from benchmarks.workload import read_cifar10
from lit_recon.attacks.updates import NonNegativeInputs
from lit_recon.attacks.updates.features.inputs import LayerInputs
from lit_recon.clients import Client
from lit_recon.data import ImageSet, sample_victims
from lit_recon.errors import LitReconError
from lit_recon.records import Normalization, Observation

#: Relative error above which an input is wrong.
WRONG = 0.05
RATE = 0.01
_HALVES = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def quickstart(seed: int) -> nn.Module:
    """The network, untrained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        convolutions = (nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2))
        linear = (nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
        return nn.Sequential(*convolutions, nn.Flatten(), *linear)


def rounded(seen: Observation) -> Observation:
    """The observation of new weights, whose difference from those before has fewer digits than the gradient."""
    update: dict[str, Tensor] = {}
    for name, value in seen.update.items():
        before = seen.parameters[name]
        update[name] = (before - (before - RATE * value)) / RATE
    return replace(seen, update=update)


def measure(images: ImageSet, n: int, seed: int, release: str) -> Row:
    """The row of the inputs found in one batch."""
    chosen = sample_victims(images.labels, n, seed)
    pixels, labels = images.pixels(chosen), images.labels[chosen]
    client = Client(quickstart(seed), image_shape=(3, 32, 32), normalization=_HALVES)
    seen = client.observe(pixels, labels)
    seen = rounded(seen) if release == "weights" else seen
    start = time.process_time()
    try:
        found = NonNegativeInputs(seed=seed)(seen)
    except LitReconError as error:
        return {"found": 0, "wrong": 0, "reason": str(error), "seconds": time.process_time() - start}
    seconds = time.process_time() - start
    with torch.no_grad():
        truth = LayerInputs(seen, found.layer)(pixels).double()
    errors, which = (torch.cdist(found.inputs, truth) / truth.norm(dim=1)).min(dim=1)
    right = None if found.labels is None else int((found.labels == labels[which]).sum())
    figures = {"found": len(errors), "wrong": int((errors > WRONG).sum()), "error": float(errors.median())}
    return {**figures, "labels_right": right, "seconds": seconds}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 24, 32, 40])
    parser.add_argument("--draws", type=int, default=3)
    arguments, _, images = read_cifar10(parser)
    with Record("layer_inputs", vars(arguments), arguments.pool) as record:
        for n in arguments.batches:
            for release in ("gradient", "weights"):
                for seed in range(arguments.draws):
                    key: Row = {"batch": n, "seed": seed, "release": release}
                    record.measure(key, partial(measure, images, n, seed, release))


if __name__ == "__main__":
    main()
