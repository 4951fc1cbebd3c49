"""How far the derivative of released weights in the unknown image holds, with activations that have kinks or have none.

    python -m benchmarks.kinks --data.root FILE.npz [--known 100 500] [--pairs 8]
    python -m benchmarks.kinks --network cnn --data.root FILE.npz --known 100 500 --activations elu --pairs 4

The MLP and the training of `configs/reconn/mnist_retraining.yaml`, or the convolutional network and the training of
`configs/reconn/cifar10_newton.yaml`, in double precision. From one image to another of
the same label, models are trained on images between the two. Where the weights depend smoothly on the image, they
change by the share of the way times their derivative: cosine and relative length are 1. Rows with a sharpness compare
what an image changes in the network with ReLU with what it changes in one with a smooth activation near ReLU.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import lit_recon._torchvision

import torch
from torch import Tensor, nn

from benchmarks.record import Record, Row, spread
from lit_recon.attacks.shadow import GradientDescent, KnownTraining, ShadowPlan, deltas, train_models, train_reference
from lit_recon.attacks.shadow.engine import Execution
from lit_recon.data import ImageSet, InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Npz
from lit_recon.data.splits import Pool
from lit_recon.models.layers import Activation
from lit_recon.models.released import ReleasedCNN, ReleasedMLP

Network = Literal["mlp", "cnn"]
ACTIVATIONS: tuple[Activation, ...] = ("elu", "relu")
#: Shares of the way from an image to another.
SHARES = (1e-4, 1e-3, 1e-2, 0.1, 1.0)
#: Share by which the derivative is measured.
DERIVATIVE = 1e-7
#: Sharpness of the smooth activation: it differs from ReLU by at most log(2) over this.
SHARPNESS = (10.0, 100.0)


def trained(known: KnownTraining, start: Tensor, images: Tensor, label: int) -> Tensor:
    """Weights `(m, p)` of models on images `(m, c, h, w)` of one label."""
    how: Execution = "vmap" if isinstance(known.network, ReleasedMLP) else "loop"
    return train_models(known, start, images, torch.full((len(images),), label), how)


def along(known: KnownTraining, start: Tensor, first: Tensor, other: Tensor, label: int) -> Row:
    """Changes of the weights on the way from an image to another, beside their derivative at the first."""
    shares = torch.tensor([0.0, DERIVATIVE, *SHARES], dtype=first.dtype)
    weights = trained(known, start, first + shares[:, None, None, None] * (other - first), label)
    slopes = (weights[1:] - weights[0]) / shares[1:, None]
    cosines = torch.cosine_similarity(slopes[1:], slopes[:1], dim=1)
    lengths = slopes[1:].norm(dim=1) / slopes[0].norm()
    return {"cosines": cosines.tolist(), "lengths": lengths.tolist()}


def settings_of(fixed: ImageSet, activation: Activation, network: Network) -> tuple[KnownTraining, Tensor]:
    """The training in double precision, and its initial weights `(p,)`."""
    if network == "mlp":
        plan = ShadowPlan(ReleasedMLP(activation=activation), fixed, GradientDescent(steps=100, lr=0.2, momentum=0.9))
    else:
        plan = ShadowPlan(ReleasedCNN(activation=activation), fixed, GradientDescent(steps=100, lr=0.01, momentum=0.9))
    known = plan.known
    return replace(known, network=known.network.double(), images=known.images.double()), plan.initial_weights().double()


def roughness(
    fixed: ImageSet, targets: ImageSet, pairs: list[tuple[int, int]], activation: Activation, network: Network
) -> Row:
    """Cosines and lengths of all pairs, by share of the way."""
    known, start = settings_of(fixed, activation, network)
    images, labels = targets.pixels().double(), targets.labels.tolist()
    found = [along(known, start, images[first], images[other], labels[first]) for first, other in pairs]
    shares = [f"{share:g}" for share in SHARES]
    by_share = {
        what: {share: spread([row[what][place] for row in found]) for place, share in enumerate(shares)}
        for what in ("cosines", "lengths")
    }
    return {"pairs": len(pairs), **by_share}


def smoothed(fixed: ImageSet, targets: ImageSet, pairs: list[tuple[int, int]], sharpness: float) -> Row:
    """Cosines of what images change in an MLP with ReLU with what they change in a smooth one."""
    known, start = settings_of(fixed, "relu", "mlp")
    network = ReleasedMLP(activation="relu").double()
    network.layers = nn.Sequential(
        *(nn.Softplus(sharpness) if isinstance(layer, nn.ReLU) else layer for layer in network.layers)
    )
    images = targets.pixels().double()[[first for first, _ in pairs]]
    labels = targets.labels[[first for first, _ in pairs]]
    sharp, smooth = (
        deltas(train_models(training, start, images, labels, "vmap"), train_reference(training, start))
        for training in (known, replace(known, network=network))
    )
    return {"pairs": len(pairs), "cosines": spread(torch.cosine_similarity(sharp, smooth, dim=1).tolist())}


def pairs_of(labels: Tensor, n: int) -> list[tuple[int, int]]:
    """The first `n` images, each with the next of its label."""
    found: list[tuple[int, int]] = []
    for first, label in enumerate(labels.tolist()):
        later = (labels[first + 1 :] == label).nonzero()
        if len(later) and len(found) < n:
            found.append((first, first + 1 + int(later[0])))
    return found


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.root", dest="root", required=True, help="an .npz file of MNIST or CIFAR-10")
    parser.add_argument("--network", choices=get_args(Network), default="mlp", help="mlp for MNIST, cnn for CIFAR-10")
    parser.add_argument("--activations", nargs="+", choices=ACTIVATIONS, default=ACTIVATIONS)
    parser.add_argument("--known", type=int, nargs="+", default=[100, 500, 2_000], help="sizes of the fixed set")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of images")
    parser.add_argument("--pool", choices=get_args(Pool), default="evaluation", help="of the images")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    name = "kinks" if arguments.network == "mlp" else f"kinks_{arguments.network}"
    with Record(name, vars(arguments), arguments.pool) as record:
        for known in arguments.known:
            sizes = InformedSplitSettings(known, shadow=10, targets=20 * arguments.pairs, pool=arguments.pool)
            split = draw_informed_split(Npz(Path(arguments.root)), sizes)
            sets = split.fixed, split.targets, pairs_of(split.targets.labels, arguments.pairs)
            for activation in arguments.activations:
                measured = partial(roughness, *sets, activation, arguments.network)
                record.measure({"known": known, "activation": activation}, measured)
            for sharpness in SHARPNESS if arguments.network == "mlp" and "relu" in arguments.activations else ():
                record.measure({"known": known, "sharpness": sharpness}, partial(smoothed, *sets, sharpness))


if __name__ == "__main__":
    main()
