"""Shadow models by linear response against training them: time, memory, and what an attack makes of either.

    python -m benchmarks.linear_shadows [--known 10000] [--models 2000] [--rounds 3] [--mnist FILE.npz]

Seconds are of processor time. Linear response costs the path and its Hessians once, whatever the number of models; both
parts are told apart by two runs with different numbers of models. Memory is measured in processes of their own. With
real images, kernel ridge regression learns from exact and from linear shadow models of the same images, and attacks the
same models, all of them trained exactly.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import time
from functools import partial
from pathlib import Path

import lit_recon._torchvision

import torch
from torch import Tensor

from benchmarks.record import Record, Row, alternate, ratios, spread, status_mib
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.shadow import (
    GradientDescent,
    KnownTraining,
    LinearResponse,
    ShadowPlan,
    deltas,
    train_models,
    train_reference,
)
from lit_recon.attacks.shadow.engines.batched_mlp import chunk_size
from lit_recon.attacks.shadow.linear_response import n_coordinates, respond
from lit_recon.attacks.shadow.training import flat_weights
from lit_recon.data import InformedSplitSettings, draw_informed_split
from lit_recon.data.dataset import seeded_generator
from lit_recon.data.sources import Npz
from lit_recon.metrics import MeanImage, mse
from lit_recon.models.released import ReleasedMLP
from lit_recon.training.trainer import keep_freed_memory

#: Models that move together, as in a file of a store.
_GROUP = 250


def random_training(n: int, steps: int, n_own: int) -> tuple[KnownTraining, Tensor, Tensor, Tensor]:
    """MLP 784-10-10 on random images: the training, initial weights, own images and labels."""
    generator = seeded_generator(0, "benchmark")
    images = torch.rand(n + n_own, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (n + n_own,), generator=generator)
    network = ReleasedMLP()
    network.initialize(generator)
    known = KnownTraining(network, images[:n], labels[:n], GradientDescent(steps=steps))
    return known, flat_weights(network), images[n:], labels[n:]


def by_linear_response(
    known: KnownTraining, start: Tensor, images: Tensor, labels: Tensor, response: LinearResponse
) -> list[Tensor]:
    """Differences, group by group."""
    groups = list(zip(images.split(_GROUP), labels.split(_GROUP), strict=True))
    return list(respond(known, start, groups, response))


def speed(n: int, models: int, steps: int, rounds: int, response: LinearResponse) -> Row:
    """Seconds per model of either way, and what linear response takes once; `models` more than one group."""
    known, start, images, labels = random_training(n, steps, models)
    few, exact = min(_GROUP, models // 2), chunk_size(known)
    spent = alternate(
        {
            "exact": partial(train_models, known, start, images[:exact], labels[:exact], "batched_mlp"),
            "few": partial(by_linear_response, known, start, images[:few], labels[:few], response),
            "many": partial(by_linear_response, known, start, images, labels, response),
        },
        rounds,
        time.process_time,
    )
    pairs = list(zip(spent["few"], spent["many"], strict=True))
    linear = [(many - some) / (models - few) for some, many in pairs]
    per_model = {"exact": [seconds / len(images[:exact]) for seconds in spent["exact"]], "linear": linear}
    once = [some - few * each for (some, _), each in zip(pairs, linear, strict=True)]
    return {
        "known_images": n,
        "steps": steps,
        "response": dataclasses.asdict(response),
        "models": models,
        "models_per_second": {way: round(1 / spread(values)["median"], 2) for way, values in per_model.items()},
        "seconds_per_model": {way: spread(values) for way, values in per_model.items()},
        "seconds_once": spread(once),
        "ratio": ratios(per_model, "exact"),
    }


def memory(n: int, models: list[int], response: LinearResponse) -> list[Row]:
    """MiB at most above what the images take, for several numbers of models."""
    rank, hessian = response.rank, 4 * n_coordinates(ReleasedMLP(), 784, response.rank) ** 2
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        used = pool.starmap(_peak, [(n, each, response) for each in models], chunksize=1)
    kept = round(100 * hessian / 2**20)
    return [
        {"models": each, "peak_mib": round(mib, 1), "rank": rank, "hundred_hessians_would_take_mib": kept}
        for each, mib in zip(models, used, strict=True)
    ]


def _peak(n: int, models: int, response: LinearResponse) -> float:
    # Two steps hold all that a hundred hold.
    known, start, images, labels = random_training(n, 2, models)
    before = status_mib("VmRSS")
    groups = list(zip(images.split(_GROUP), labels.split(_GROUP), strict=True))
    for _ in respond(known, start, groups, response):
        pass
    return status_mib("VmHWM") - before


def attack(source: Path, n: int, shadows: int, targets: int, response: LinearResponse) -> Row:
    """MSE of kernel ridge regression that learned from exact and from linear models, on exact ones."""
    split = draw_informed_split(Npz(source), InformedSplitSettings(fixed=n, shadow=shadows, targets=targets))
    plan = ShadowPlan(ReleasedMLP(), split.fixed, GradientDescent())
    known, start = plan.known, plan.initial_weights()
    reference = train_reference(known, start)
    images, labels = split.shadow.pixels(), split.shadow.labels
    observed, exact = (
        deltas(train_models(known, start, own.pixels(), own.labels, "batched_mlp"), reference)
        for own in (split.targets, split.shadow)
    )
    linear = torch.cat(by_linear_response(known, start, images, labels, response))
    errors, truth = (linear - exact).norm(dim=1) / exact.norm(dim=1), split.targets.pixels()
    found: Row = {"known_images": n, "shadow_models": shadows, "targets": targets}
    for way, differences in (("exact", exact), ("linear", linear)):
        fitted = KernelRidge().fitted(differences, images, labels, split.fixed.n_classes)
        found[f"mse_{way}"] = round(float(mse(fitted.reconstruct(observed).images, truth).mean()), 5)
    mean = MeanImage.from_images(split.fixed.images).query(truth)
    return {**found, "mse_mean_image": round(float(mse(mean, truth).mean()), 5), "error": spread(errors.tolist())}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--known", type=int, default=10_000, help="size of the fixed set")
    parser.add_argument("--models", type=int, default=2_000, help="by linear response, per round")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=100)
    parser.add_argument("--hessian_images", type=int, default=2_000)
    parser.add_argument("--memory", type=int, nargs="*", default=[1_000, 4_000, 12_000], help="numbers of models")
    parser.add_argument("--mnist", type=Path, help="an .npz file of real images, to attack")
    parser.add_argument("--attack_known", type=int, default=10_000)
    parser.add_argument("--shadows", type=int, default=300, help="to learn from, for the attack")
    parser.add_argument("--targets", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as every command does
    response = LinearResponse(arguments.rank, arguments.hessian_images)
    with Record("linear_shadows", vars(arguments)) as record:
        rates = arguments.known, arguments.models, arguments.steps, arguments.rounds
        record.measure({"part": "speed"}, partial(speed, *rates, response))
        if arguments.memory:
            peaks = partial(memory, arguments.known, arguments.memory, response)
            record.measure({"part": "memory"}, lambda: {"memory": peaks()})
        if arguments.mnist:
            sizes = arguments.attack_known, arguments.shadows, arguments.targets
            record.measure({"part": "attack"}, partial(attack, arguments.mnist, *sizes, response))


if __name__ == "__main__":
    main()
