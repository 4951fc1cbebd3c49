"""How much of a client's images the attack on feature maps finds behind every defense.

    python -m benchmarks.defended --data.root DIR --checkpoint FILE [--kinds prune drop] [--cells "prune 0.9/1/eval"]

Every cell has its own draws of test images of CIFAR-10. The kinds of defenses have records of their own, so that
several processes can share the work. The kind `bound` is no defense: it is the Cramer-Rao bound for Gaussian noise and
for DP-SGD. The attacks are those of `configs/attack/feature_maps.yaml` but for the last: the deep image prior that they
make way to is no part of this table.
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
from torch.nn.functional import cross_entropy

from benchmarks.certificates import Attacked, Cell, attacks_of, drawn, summary
from benchmarks.record import Record, Row
from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates import FirstApplicable
from lit_recon.bounds import GaussianPrior, NetworkJacobian, Rounding, cramer_rao, van_trees
from lit_recon.clients.gradient import GradientOperator, pure_copy
from lit_recon.clients.settings import ClientSettings, LocalTraining
from lit_recon.data import ImageSet
from lit_recon.data.sources import CIFAR10
from lit_recon.data.splits import Pool, in_pool
from lit_recon.defenses import DPSGD, Defense, GaussianNoise, GradientClipping, GradientDropout, GradientPruning, Round
from lit_recon.experiments.update_attack.bound import PIXEL_VARIANCE
from lit_recon.models import Backbone
from lit_recon.models.checkpoint import load_backbone
from lit_recon.records import Batch, BatchNormMode, Knowledge, Weights

#: Local training on the same images, by the name of its rows.
LOCAL = {
    f"{steps} local steps" + ("" if lr == 0.01 else f", rate {lr:g}"): LocalTraining(steps=steps, lr=lr)
    for steps in (3, 5)
    for lr in (0.01, 0.001)
}
#: Defenses by kind and name; the names are those of the rows.
DEFENSES: dict[str, dict[str, Defense]] = {
    "none": {"none": Defense()},
    "prune": {f"prune {p:g}": GradientPruning(p) for p in (0.3, 0.5, 0.7, 0.9, 0.95, 0.99)},
    "prune_tensor": {f"prune {p:g} of every tensor": GradientPruning(p, "tensor") for p in (0.3, 0.5, 0.7, 0.9)},
    "drop": {f"drop {p:g}": GradientDropout(p) for p in (0.3, 0.5, 0.7, 0.9)},
    "noise": {f"noise {std:g}": GaussianNoise(std) for std in (1e-4, 1e-3, 1e-2)},
    "local": dict.fromkeys(LOCAL, Defense()),
    "dpsgd": {f"DP-SGD with C = 1, noise {std:g}": DPSGD(1.0, std) for std in (1e-4, 1e-3, 1e-2)},
    "clip": {f"clip {bound:g}": GradientClipping(bound) for bound in (2, 4, 8)},
}
#: The client's BatchNorm mode `train` where the attacker also has the statistics of its batch, as in Liu et al. 2025.
KNOWN = "train, statistics known"
#: The kind of the bound.
BOUND = "bound"


@dataclass(frozen=True)
class Defended:
    """One row: `draws` batches under a defense."""

    defense: str
    batch: int
    batch_norm: str
    draws: int

    @property
    def name(self) -> str:
        return f"{self.defense}/{self.batch}/{self.batch_norm}"


def cells(kind: str) -> Iterator[Defended]:
    """The rows of a kind of defense; those with statistics of the batch for every second strength."""
    for number, name in enumerate(DEFENSES[kind]):
        # searches with noise and local steps take all entries of the gradients, and three times as long
        for batch, draws in ((1, 4 if kind in ("noise", "dpsgd", "local") else 8), (4, 4)):
            for mode in (*get_args(BatchNormMode), KNOWN):
                if mode == "eval" or number % 2 == 1 or len(DEFENSES[kind]) == 1:
                    yield Defended(name, batch, mode, draws)


def measure(model: Backbone, private: ImageSet, attack: Attack, defense: Defense, cell: Defended) -> Row:
    """The summary of a cell's batches."""
    batches = []
    mode: BatchNormMode = "eval" if cell.batch_norm == "eval" else "train"
    knowledge = Knowledge(defense=True, batch_norm="batch" if cell.batch_norm == KNOWN else "running")
    client = ClientSettings(mode, LOCAL.get(cell.defense)).client(model, defense)
    draws = drawn(private.labels, Cell(cell.name, cell.batch, mode, "distinct", cell.draws))
    for number, ids in enumerate(draws):
        images, labels = private.pixels(ids), private.labels[ids]
        seen = client.observe(images, labels, knowledge, ClientSettings().generator(number))
        batches.append(Attacked.by(attack, seen, images))
    return {"images": cell.batch * cell.draws, **summary(batches)}


def bounds(model: Backbone, image: Tensor, label: Tensor) -> Row:
    """The Cramer-Rao errors of one image `(1, 3, 32, 32)` behind noise and DP-SGD, without and with a prior."""
    started = time.process_time()
    network, weights = pure_copy(model, "eval"), Weights.of(model)
    jacobian = NetworkJacobian(network, weights, Batch(image, label), cross_entropy)
    gram = jacobian.gram()
    size = Rounding.of(gram, jacobian.rounding()).size / float(gram.trace())
    prior = GaussianPrior.isotropic(len(gram), PIXEL_VARIANCE)
    round_ = Round(jacobian.batch, partial(GradientOperator(model, "eval"), weights))
    defenses = DEFENSES["noise"] | DEFENSES["dpsgd"]
    found: dict[str, list[float]] = {"cramer_rao": [], "van_trees": []}
    for defense in defenses.values():
        generator = ClientSettings().generator(0)  # of masks, which neither of these defenses draws
        information = defense.released_information(jacobian, round_, defense.released_std(1), generator).information
        unbiased = cramer_rao(information, size * float(information.trace()))
        for key, bound in (("cramer_rao", unbiased), ("van_trees", van_trees(information, prior))):
            found[key].append(float(f"{bound.rmse:.3g}"))
    return {"defenses": list(defenses), **found, "seconds": round(time.process_time() - started, 1)}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.root", dest="root", required=True, help="folder of CIFAR-10")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a ResNet-18 that was trained on CIFAR-10")
    parser.add_argument("--kinds", nargs="+", choices=[*DEFENSES, BOUND], default=[*DEFENSES, BOUND])
    parser.add_argument("--cells", nargs="+", help="names as in the example above; default: all")
    parser.add_argument("--pool", choices=get_args(Pool), default="evaluation", help="of the attacked images")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    _, test = CIFAR10(root=Path(arguments.root)).load()
    private = test.subset(in_pool(test, arguments.pool))
    model = load_backbone(arguments.checkpoint).model
    settings = {key: value for key, value in vars(arguments).items() if key != "kinds"}
    attack = FirstApplicable(attacks_of("feature_maps")[:-1])
    if BOUND in arguments.kinds:
        draws = drawn(private.labels, Cell(BOUND, 1, "eval", "distinct", 2))
        with Record("bound_noise", settings, arguments.pool) as record:
            for number, ids in enumerate(draws):
                one = partial(bounds, model, private.pixels(ids), private.labels[ids])
                record.measure({"image": number}, one)
    for kind in (kind for kind in arguments.kinds if kind != BOUND):
        with Record(f"defended_{kind}", settings, arguments.pool) as record:
            for cell in cells(kind):
                if not arguments.cells or cell.name in arguments.cells:
                    defense = DEFENSES[kind][cell.defense]
                    record.measure(vars(cell), partial(measure, model, private, attack, defense, cell))


if __name__ == "__main__":
    main()
