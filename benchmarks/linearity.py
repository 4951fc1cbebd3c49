"""How far differences of shadow models are linear in the gradients of their own images, by optimizer.

    python -m benchmarks.linearity --cifar10 FILE.npz [--known 500 1000] [--models 3]

Network and training are the paper's for CIFAR-10, [Balle2022] tables V, VI and IX, in double precision. A model is
trained on the known images and its own, whose gradient counts in full or by a small share. The difference that a small
share makes, scaled up, is what linear response without any further error predicts.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import lit_recon._torchvision

import torch
from torch import Tensor
from torch.func import grad

from benchmarks.record import Record, Row, spread
from benchmarks.released_training import OPTIMIZERS
from lit_recon.attacks.shadow import KnownTraining, ShadowPlan
from lit_recon.attacks.shadow.steps import Descent
from lit_recon.attacks.shadow.training import cross_entropy
from lit_recon.data import InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Npz
from lit_recon.models.released import ReleasedCNN

#: Shares of its own image's gradient by which the derivative is measured.
SHARES = (0.1, 1e-2, 1e-3)
#: Known images whose gradients are computed at a time.
_FIXED = 500


def trained(known: KnownTraining, start: Tensor, image: Tensor, label: Tensor, share: float) -> Tensor:
    """Weights `(p,)` of a model of which a share of its own image's gradient is used, `(1, c, h, w)` with its label."""
    gradient = grad(partial(cross_entropy, known.network, reduction="sum"))
    weights = start[None].clone()
    descent = Descent(known.descent, [weights])
    with torch.no_grad():
        for _ in range(known.n_steps):
            total = share * gradient(weights[0], image, label)
            for images, labels in zip(known.images.split(_FIXED), known.labels.split(_FIXED), strict=True):
                total += gradient(weights[0], images, labels)
            descent.step([total[None]], scale=1 / (len(known.images) + 1))
    return weights[0]


def measure(source: Path, n: int, models: int, optimizer: str) -> Row:
    """Relative errors and cosines of scaled differences of some models, by share of the own image's gradient."""
    split = draw_informed_split(Npz(source), InformedSplitSettings(fixed=n, shadow=max(2, models), targets=1))
    plan = ShadowPlan(ReleasedCNN(), split.fixed, OPTIMIZERS[optimizer])
    known, start = plan.known, plan.initial_weights().double()
    known = replace(known, network=known.network.double(), images=known.images.double())
    images, labels = split.shadow.pixels().double()[:models], split.shadow.labels[:models]
    reference = trained(known, start, images[:1], labels[:1], 0.0)
    errors: dict[str, list[float]] = {f"{share:g}": [] for share in SHARES}
    cosines: dict[str, list[float]] = {f"{share:g}": [] for share in SHARES}
    for image, label in zip(images.split(1), labels.split(1), strict=True):
        whole = trained(known, start, image, label, 1.0) - reference
        for share in SHARES:
            scaled = (trained(known, start, image, label, share) - reference) / share
            errors[f"{share:g}"].append(float((scaled - whole).norm() / whole.norm()))
            cosines[f"{share:g}"].append(float(torch.cosine_similarity(scaled, whole, dim=0)))
    return {
        "models": len(images),
        "errors": {share: spread(values) for share, values in errors.items()},
        "cosines": {share: spread(values) for share, values in cosines.items()},
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, required=True, help="an .npz file of CIFAR-10")
    parser.add_argument("--known", type=int, nargs="*", default=[500, 1_000], help="sizes of the fixed set")
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with Record("linearity", vars(arguments)) as record:
        for n in arguments.known:
            for optimizer in OPTIMIZERS:
                key: Row = {"known_images": n, "optimizer": optimizer}
                record.measure(key, partial(measure, arguments.cifar10, n, arguments.models, optimizer))


if __name__ == "__main__":
    main()
