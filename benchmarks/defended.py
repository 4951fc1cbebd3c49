"""How much of a client's images the attack on feature maps finds behind every defense.

    python -m benchmarks.defended --data.root DIR --checkpoint FILE [--kinds prune drop] [--cells "prune 0.9/1/eval"]

Every cell has its own draws of test images of CIFAR-10, but for single images behind noise: the first of these are the
images of the bound, so that the two compare. The kinds of defenses have records of their own, so that several processes
can share the work. The kinds `bound`, `bound_optimal_noise` and `bound_masks` are no defenses: they are the Cramer-Rao
bound for noise of one size, alone or behind clipping, that for optimal gradient noise of known variances, and what
updates without noise leave undetermined. The kind `likelihood` goes on from single images that were found behind noise,
by the likelihood of the whole update in place of patches; `hidden_span` compares the share of the patches' span that
noise is expected to hide with what it does hide. The attacks are those of `configs/attack/feature_maps.yaml` but the
last one: the deep image prior that they make way to is no part of this table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import lit_recon._torchvision

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.certificates import Attacked, Cell, attacks_of, drawn, summary
from benchmarks.record import Record, Row
from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates import (
    LBFGS,
    FirstApplicable,
    GradientMatching,
    HeadCounts,
    Likelihood,
    PatchMatching,
    Pixels,
)
from lit_recon.attacks.updates.feature_maps.patches import hidden_span
from lit_recon.attacks.updates.gradient_matching.matching import update_misfits
from lit_recon.attacks.updates.noise import noise_of
from lit_recon.bounds import (
    GaussianPrior,
    NetworkJacobian,
    Rounding,
    SampledJacobian,
    cramer_rao,
    remaining,
    unknown_basis,
    van_trees,
)
from lit_recon.clients.client import Client, ClientSettings, LocalTraining
from lit_recon.clients.gradient import GradientOperator, pure_copy
from lit_recon.data import ImageSet
from lit_recon.data.sources import CIFAR10
from lit_recon.data.splits import Pool, in_pool
from lit_recon.defenses import (
    DPSGD,
    Chain,
    Defense,
    GaussianNoise,
    GradientClipping,
    GradientDropout,
    GradientPruning,
    LaplaceNoise,
    OptimalGradientNoise,
    Round,
)
from lit_recon.experiments.update_attack.bound import PIXEL_VARIANCE
from lit_recon.models import Backbone
from lit_recon.models.checkpoint import load_backbone
from lit_recon.records import Batch, BatchNormMode, Knowledge, Observation, Weights

#: Local training on the same images, by the name of its rows.
LOCAL = {
    f"{steps} local steps" + ("" if lr == 0.01 else f", rate {lr:g}"): LocalTraining(steps=steps, lr=lr)
    for steps in (3, 5)
    for lr in (0.01, 0.001)
}
#: Updates of several clients behind secure aggregation, or of several mini-batches, by the name of their rows.
SEVERAL = {
    "4 clients": ClientSettings(n_clients=4),
    "2 clients, 2 local steps": ClientSettings(local_steps=LocalTraining(steps=2), n_clients=2),
    "2 mini-batches": ClientSettings(local_steps=LocalTraining(steps=2, batches=2)),
}
#: Defenses by kind and name; the names are those of the rows.
DEFENSES: dict[str, dict[str, Defense]] = {
    "none": {"none": Defense()},
    "prune": {f"prune {p:g}": GradientPruning(p) for p in (0.3, 0.5, 0.7, 0.9, 0.95, 0.99)},
    "prune_tensor": {f"prune {p:g} of every tensor": GradientPruning(p, "tensor") for p in (0.3, 0.5, 0.7, 0.9)},
    "drop": {f"drop {p:g}": GradientDropout(p) for p in (0.3, 0.5, 0.7, 0.9)},
    "noise": {f"noise {std:g}": GaussianNoise(std) for std in (1e-4, 1e-3, 1e-2)},
    "local": dict.fromkeys(LOCAL, Defense()),
    "optimal_noise": {f"optimal gradient noise {std:g}": OptimalGradientNoise(std) for std in (1e-3, 1e-2, 1e-1)},
    "dpsgd": {f"DP-SGD with C = 1, noise {std:g}": DPSGD(1.0, std) for std in (1e-4, 1e-3, 1e-2)},
    "clip": {f"clip {bound:g}": GradientClipping(bound) for bound in (2, 4, 8)},
    "chain": {
        "clip 4, prune 0.5, drop 0.3": Chain([GradientClipping(4.0), GradientPruning(0.5), GradientDropout(0.3)]),
    },
    "other_noise": {
        "clip 4, noise 0.001": Chain([GradientClipping(4.0), GaussianNoise(0.001)]),
        "Laplace noise 0.001": LaplaceNoise(0.001),
    },
    "several": dict.fromkeys(SEVERAL, Defense()),
}
#: The client's BatchNorm mode `train` where the attacker also has the statistics of its batch, as in Liu et al. 2025.
KNOWN = "train, statistics known"
#: The kinds of the bound: with noise, with noise that depends on the images, and without; and the images of each.
BOUND, BOUND_OPTIMAL, BOUND_MASKS = "bound", "bound_optimal_noise", "bound_masks"
BOUND_IMAGES = {BOUND: 4, BOUND_OPTIMAL: 4, BOUND_MASKS: 2}
#: The kinds of single images behind noise: what follows on images found, and what noise hides of the patches' span.
FOLLOWED, HIDDEN = "likelihood", "hidden_span"
#: The kinds of defenses that add noise. Gradients of images differ by factors, and errors behind noise by the same.
NOISY = ("noise", "optimal_noise", "dpsgd", "other_noise")


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
    """The rows of a kind; with statistics of the batch every second defense, and all single images if they are known.

    Statistics of several steps or clients are not known. Rows of several clients or mini-batches are of batches alone.
    """
    for number, name in enumerate(DEFENSES[kind]):
        for batch, draws in ((1, 8), (4, 4)):
            if kind == "several" and batch == 1:
                continue
            for mode in (*get_args(BatchNormMode), KNOWN):
                if mode == KNOWN and kind in ("several", "local"):
                    continue
                if mode == "eval" or number % 2 == 1 or len(DEFENSES[kind]) <= 2 or (mode == KNOWN and batch == 1):
                    yield Defended(name, batch, mode, draws)


def misfit(seen: Observation, found: Attacked) -> float | None:
    """The largest misfit of a tensor of the update of the images found, in standard deviations of the noise.

    None: nothing was found, or no noise of known scale is added.
    """
    noise, given = noise_of(seen, exact=False)
    if noise is None or not given or found.found is None:
        return None
    misfits = update_misfits(seen, found.found.images, found.found.labels)
    return float(f"{max(misfits.values()) / noise.std:.3g}")


def drawn_for(labels: Tensor, cell: Defended, kind: str) -> list[Tensor]:
    """The images of a cell's draws; of single images behind noise the first ones are those of the bound."""
    mode: BatchNormMode = "eval" if cell.batch_norm == "eval" else "train"
    own = drawn(labels, Cell(cell.name, cell.batch, mode, "distinct", cell.draws))
    if kind not in NOISY or cell.batch > 1:
        return own
    first = drawn(labels, Cell(BOUND, 1, "eval", "distinct", BOUND_IMAGES[BOUND]))
    taken = {int(ids) for ids in first}
    return [*first, *(ids for ids in own if int(ids) not in taken)][: cell.draws]


def observations(
    client: Client, private: ImageSet, draws: list[Tensor], knowledge: Knowledge | None = None
) -> Iterator[tuple[Tensor, Observation]]:
    """The images of every draw and what the server sees of them; by default it knows the defense."""
    for number, ids in enumerate(draws):
        images, generator = private.pixels(ids), ClientSettings().generator(number)
        yield images, client.observe(images, private.labels[ids], knowledge or Knowledge(defense=True), generator)


def measure(
    model: Backbone, private: ImageSet, attack: Attack, defense: Defense, cell: Defended, draws: list[Tensor]
) -> Row:
    """The summary of a cell's batches, and in units of noise how far the updates of the images found are off."""
    batches, misfits = [], []
    mode: BatchNormMode = "eval" if cell.batch_norm == "eval" else "train"
    knowledge = Knowledge(defense=True, batch_norm="batch" if cell.batch_norm == KNOWN else "running")
    rule = SEVERAL.get(cell.defense, ClientSettings(local_steps=LOCAL.get(cell.defense)))
    client = replace(rule, batch_norm=mode).client(model, defense)
    for images, seen in observations(client, private, draws, knowledge):
        batches.append(Attacked.by(attack, seen, images))
        misfits.append(misfit(seen, batches[-1]))
    return {"images": cell.batch * cell.draws, **summary(batches), "misfit": misfits}


def followed(
    model: Backbone, private: ImageSet, patches: GradientMatching, defense: Defense, draws: list[Tensor]
) -> Row:
    """Errors, misfits and seconds of images found by `patches`, and after steps on the update's likelihood from there.

    Both weigh total variation alike, against the log-likelihood in nats per pixel.
    """
    client = ClientSettings("eval").client(model, defense)
    found: dict[str, list[Row]] = {"before": [], "after": []}
    for images, seen in observations(client, private, draws):
        first = Attacked.by(patches, seen, images)
        if first.found is None:
            continue
        pixels, solver = Pixels(box=False, smooth=0.5), LBFGS(inner=20, history=300)
        matching = GradientMatching(Likelihood(), patches.priors, pixels, solver, HeadCounts(), steps=10)
        started = time.process_time()
        [moved] = matching.follow([first.found], [seen]).finish()
        second = Attacked.of(moved, images, time.process_time() - started)
        for when, one in (("before", first), ("after", second)):
            row = {"rmse": one.rmse[0], "misfit": misfit(seen, one), "seconds": round(one.seconds, 1)}
            found[when].append(row)
    return found


def hidden(model: Backbone, private: ImageSet, defense: Defense, draws: list[Tensor]) -> Row:
    """The share of the patches' span that noise is expected to hide in each layer, and does; means over single images.

    What it does hide: the mean squared sine of the gradient's leading directions, one for each patch, with the true
    patches' span; where nothing stands out of the noise these are random, and partly inside by chance, which counts in
    the expectation. `apart` is the largest difference of a layer's two shares for an image.
    """
    client = ClientSettings("eval").client(model, defense)
    shares: dict[str, list[tuple[float, float]]] = {}
    for images, seen in observations(client, private, draws):
        judged, (noise, _) = PatchMatching(most_hidden=None).prepare(seen).judged, noise_of(seen, exact=False)
        assert noise is not None
        for rows, patches in zip(judged.rows, judged.patches(images), strict=True):
            random = 1 - rows.patches / rows.values.shape[1]
            expected = random * float(hidden_span(rows, noise.std).mean())
            _, _, leading = torch.linalg.svd(rows.values.double(), full_matrices=False)
            true = torch.linalg.qr(patches.double().T)[0]
            inside = (leading[: rows.patches] @ true).square().sum() / min(rows.patches, len(leading))
            shares.setdefault(rows.layer.name, []).append((expected, 1 - float(inside)))
    means = [[statistics.mean(pair[i] for pair in own) for own in shares.values()] for i in (0, 1)]
    apart = max(abs(expected - actual) for own in shares.values() for expected, actual in own)
    return {"images": len(draws), "layers": list(shares), "expected": means[0], "actual": means[1], "apart": apart}


def linearized(
    model: Backbone, image: Tensor, label: Tensor, mode: BatchNormMode = "eval"
) -> tuple[NetworkJacobian, Round]:
    """The Jacobian of the undefended gradient, and the round of its client."""
    weights, batch = Weights.of(model), Batch(image, label)
    jacobian = NetworkJacobian(pure_copy(model, mode), weights, batch, cross_entropy)
    return jacobian, Round(batch, partial(GradientOperator(model, mode), weights))


def bounds(model: Backbone, image: Tensor, label: Tensor) -> Row:
    """The Cramer-Rao errors of one image `(1, 3, 32, 32)` behind noise of one size, without and with a prior."""
    started = time.process_time()
    jacobian, round_ = linearized(model, image, label)
    size = rounded(jacobian, jacobian.gram())
    found: dict[str, Tensor] = {}
    for name, defense in (DEFENSES["noise"] | DEFENSES["dpsgd"] | DEFENSES["other_noise"]).items():
        # all have noise of their own, and draw no masks
        released = defense.released_information(jacobian, round_, 1.0, ClientSettings().generator(0))
        found[name] = released.information
    return {**errors(found, size), "seconds": round(time.process_time() - started, 1)}


def optimal_bounds(model: Backbone, image: Tensor, label: Tensor) -> Row:
    """The same behind optimal gradient noise, for attackers who know the variances."""
    started = time.process_time()
    jacobian, round_ = linearized(model, image, label)
    [(first, defense), *others] = DEFENSES["optimal_noise"].items()
    found = {first: defense.released_information(jacobian, round_, 1.0, ClientSettings().generator(0)).information}
    assert isinstance(defense, OptimalGradientNoise)
    for name, other in others:
        assert isinstance(other, OptimalGradientNoise)
        # the same directions are drawn, and all variances are in the same proportion
        found[name] = found[first] * (defense.std / other.std) ** 2
    size = rounded(jacobian, jacobian.computed)
    return {**errors(found, size), "seconds": round(time.process_time() - started, 1)}


def rounded(jacobian: NetworkJacobian, gram: Tensor) -> float:
    """The share of a Gram matrix of a Jacobian that is rounding."""
    return Rounding.of(gram, jacobian.rounding()).size / float(gram.trace())


def errors(found: Mapping[str, Tensor], size: float) -> dict[str, list[Any]]:
    """The errors that the information in releases leaves, by defense; `size`: the share of it that is rounding."""
    rows: dict[str, list[Any]] = {"defenses": list(found), "cramer_rao": [], "van_trees": []}
    for information in found.values():
        prior = GaussianPrior.isotropic(len(information), PIXEL_VARIANCE)
        rounding = size * float(information.trace())
        rows["cramer_rao"].append(float(f"{cramer_rao(information, rounding).rmse:.3g}"))
        rows["van_trees"].append(float(f"{van_trees(information, prior, rounding).rmse:.3g}"))
    return rows


def masked_bounds(model: Backbone, image: Tensor, label: Tensor) -> Row:
    """The directions of one image `(1, 3, 32, 32)` that updates without noise leave unknown, and their error.

    The error is that which the prior of `bounds` leaves if all other directions are known exactly. Most defenses are
    settled by some of the entries; `every_entry` says for which ones these leave directions open, so that all count.
    """
    started = time.process_time()
    jacobian, round_ = linearized(model, image, label)
    sampled = SampledJacobian(jacobian)
    prior = GaussianPrior.isotropic(jacobian.n_inputs, PIXEL_VARIANCE)
    defenses = {
        name: one for kind in ("none", "drop", "prune", "prune_tensor", "clip") for name, one in DEFENSES[kind].items()
    }
    found: dict[str, list[float]] = {"unknown": [], "with_prior": [], "every_entry": []}
    for defense in defenses.values():
        information = defense.released_information(sampled, round_, 1.0, ClientSettings().generator(0)).information
        unknown = unknown_basis(information, sampled.rounding(information))
        every = unknown.numel() > 0
        if every:
            information = defense.released_information(jacobian, round_, 1.0, ClientSettings().generator(0)).information
            size = rounded(jacobian, jacobian.computed)
            unknown = unknown_basis(information, size * float(information.trace()))
        found["unknown"].append(unknown.shape[1])
        found["with_prior"].append(float(f"{remaining(unknown, prior).rmse:.3g}"))
        found["every_entry"].append(every)
    return {"defenses": list(defenses), **found, "seconds": round(time.process_time() - started, 1)}


def main() -> None:
    """Measure, print and record."""
    measured_bounds: dict[str, tuple[str, Callable[[Backbone, Tensor, Tensor], Row]]] = {
        BOUND: ("bound_noise", bounds),
        BOUND_OPTIMAL: (BOUND_OPTIMAL, optimal_bounds),
        BOUND_MASKS: (BOUND_MASKS, masked_bounds),
    }
    kinds = [*DEFENSES, *measured_bounds, FOLLOWED, HIDDEN]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.root", dest="root", required=True, help="folder of CIFAR-10")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a ResNet-18 that was trained on CIFAR-10")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
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
    for kind, (name, measured) in measured_bounds.items():
        if kind not in arguments.kinds:
            continue
        draws = drawn(private.labels, Cell(BOUND, 1, "eval", "distinct", BOUND_IMAGES[kind]))
        with Record(name, settings, arguments.pool) as record:
            for number, ids in enumerate(draws):
                one = partial(measured, model, private.pixels(ids), private.labels[ids])
                record.measure({"image": number}, one)
    [_, patches, *_] = attacks_of("feature_maps")
    assert isinstance(patches, GradientMatching)
    behind_noise: dict[str, tuple[dict[str, Defense], Callable[[Defense, list[Tensor]], Row]]] = {
        FOLLOWED: (DEFENSES["noise"], partial(followed, model, private, patches)),
        HIDDEN: (DEFENSES["noise"] | DEFENSES["dpsgd"], partial(hidden, model, private)),
    }
    for kind, (defenses, single) in behind_noise.items():
        if kind not in arguments.kinds:
            continue
        draws = drawn(private.labels, Cell(BOUND, 1, "eval", "distinct", BOUND_IMAGES[BOUND]))
        with Record(kind, settings, arguments.pool) as record:
            for name, defense in defenses.items():
                record.measure({"defense": name}, partial(single, defense, draws))
    for kind in (kind for kind in arguments.kinds if kind in DEFENSES):
        with Record(f"defended_{kind}", settings, arguments.pool) as record:
            for cell in cells(kind):
                if not arguments.cells or cell.name in arguments.cells:
                    defense = DEFENSES[kind][cell.defense]
                    draws = drawn_for(private.labels, cell, kind)
                    record.measure(vars(cell), partial(measure, model, private, attack, defense, cell, draws))


if __name__ == "__main__":
    main()
