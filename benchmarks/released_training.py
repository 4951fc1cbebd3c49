"""Released models of CIFAR-10 without an attack: what they learn, and what their losses tell of membership.

    python -m benchmarks.released_training --cifar10 FILE.npz [--known 1000 5000 10000 50000] [--longest 500]
        [--device cuda]

Sizes, optimizers and epochs are those of [Balle2022] table IX, network and initial weights those of tables V
and VI. Membership is guessed by a threshold on an image's loss, as by the library that the paper used, among the known
images and all that are neither known nor the unknown one. An interrupted call goes on with the rows that are missing.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import lit_recon._torchvision

import torch

from benchmarks.record import Record, Row
from lit_recon.attacks.shadow import GradientDescent, ShadowPlan, train_models
from lit_recon.data import InformedSplitSettings, draw_informed_split
from lit_recon.data.sources import Npz
from lit_recon.experiments.rero.score import accuracies, membership_auc
from lit_recon.models.released import ReleasedCNN

#: Epochs of the table by the number of known images.
EPOCHS = {1_000: (100, 250, 500), 5_000: (100, 250, 500), 10_000: (100, 250, 500), 50_000: (100, 500, 2_000)}
OPTIMIZERS = {
    "gradient descent": GradientDescent(lr=0.01, momentum=0.9),
    "Adam": GradientDescent(optimizer="adam", lr=0.002, momentum=0.9),
}


def measure(source: Path, device: str, n: int, optimizer: str, longest: int) -> Row:
    """Accuracy and membership of one model after some epochs of its training on `n` known images and one more."""
    epochs = [count for count in EPOCHS[n] if count <= longest]
    split = draw_informed_split(Npz(source), InformedSplitSettings(fixed=n, shadow=2, targets=1))
    if split.rest is None:
        raise SystemExit(f"{source} holds no images beside {n} known ones: take a larger file, or fewer with --known")
    *snapshots, last = epochs
    kind = OPTIMIZERS[optimizer]
    descent = GradientDescent(last, kind.lr, kind.momentum, kind.optimizer, snapshots=snapshots)
    plan = ShadowPlan(ReleasedCNN(), split.fixed, descent, device=device)
    own = split.targets.pixels().to(device), split.targets.labels.to(device)
    began = time.perf_counter()
    weights = train_models(plan.known, plan.initial_weights().to(device), *own, "loop").cpu()
    seconds = time.perf_counter() - began
    rows = []
    for count, after in zip(epochs, weights.view(len(epochs), -1).float(), strict=True):
        rows.append(
            {
                "epochs": count,
                "train_accuracy": float(accuracies(plan, after[None], split.fixed)),
                "accuracy": float(accuracies(plan, after[None], split.rest)),
                "membership_auc": membership_auc(plan, after[None], split.fixed, split.rest),
            }
        )
    return {"other_images": len(split.rest), "seconds": round(seconds, 1), "models": rows}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, required=True, help="an .npz file of CIFAR-10")
    parser.add_argument("--known", type=int, nargs="*", default=list(EPOCHS), choices=list(EPOCHS), help="known images")
    parser.add_argument("--longest", type=int, default=2_000, help="epochs beyond which no model is trained")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.longest < 100:
        parser.error(f"--longest must be at least 100, the fewest epochs of the table; got {arguments.longest}")
    torch.set_num_threads(arguments.threads)
    with Record("released_training", vars(arguments), device=arguments.device) as record:
        for n in arguments.known:
            for optimizer in OPTIMIZERS:
                key: Row = {"known_images": n, "optimizer": optimizer}
                compute = partial(measure, arguments.cifar10, arguments.device, n, optimizer, arguments.longest)
                record.measure(key, compute)


if __name__ == "__main__":
    main()
