"""Time of a shadow model trained each way over that of the plain loop of `torch.optim.SGD`, with the same data.

    python -m benchmarks.shadows [--root DIR] [--known 500 1000 10000] [--rounds 5] [--steps 100] [--threads 1]

The ways run in turn in one process and are compared round by round in seconds of processor time per model and step.
Beside the ratios stands what share of the fastest matrix product of this machine they reach: counted by the arithmetic
of the plain training, two products of all pixels, and by what training by hand really does of it. How little that may
be depends on the images: random ones, which have no black pixels, stand beside MNIST and CIFAR-10 from `--root`.

Besides: the differences that the attack learns from, each way against the loop in float64; the convolutional network;
and the memory that the command takes for more and more models.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lit_recon._torchvision

import torch
from torch import Tensor

from benchmarks.record import Record, Row, alternate, ratios, spread, status_mib
from lit_recon.attacks.shadow import (
    Execution,
    GradientDescent,
    KnownTraining,
    ShadowPlan,
    ShadowStore,
    train_models,
    train_reference,
)
from lit_recon.attacks.shadow.engines.batched_mlp import chunk_size, prepared, suits
from lit_recon.attacks.shadow.engines.pixels import times_transposed
from lit_recon.attacks.shadow.training import flat_weights
from lit_recon.data import ImageSet
from lit_recon.data.dataset import seeded_generator
from lit_recon.data.sources import CIFAR10, MNIST
from lit_recon.models.released import ReleasedCNN, ReleasedMLP, ReleasedNetwork
from lit_recon.training.trainer import keep_freed_memory

#: Own images of the models, and images times steps of a measurement at most.
_OWN, _WORK = 1_000, 200_000
#: Models of one file of a store, as `train.py shadows` trains them.
_SHARD = 50


def random_images(shape: tuple[int, int, int], n: int) -> ImageSet:
    """Images of independent pixels, and labels."""
    generator = seeded_generator(0, "benchmark")
    images = torch.randint(256, (n, *shape), generator=generator).to(torch.uint8)
    return ImageSet(images, torch.randint(10, (n,), generator=generator), [str(name) for name in range(10)], "random")


def peak_flops(rounds: int) -> float:
    """Floating-point operations per second of processor time of a large float32 product; the best of some rounds."""
    a, b = torch.randn(320, 784), torch.randn(10_000, 784)
    with torch.no_grad():
        seconds = alternate({"product": lambda: times_transposed(a, b)}, max(rounds, 3), time.process_time)["product"]
    return 2 * a.numel() * len(b) / max(min(seconds), 1e-9)


def arithmetic(known: KnownTraining) -> dict[str, float]:
    """Operations per model and step in products with the fixed images, which are nearly all there are."""
    images, fixed = known.images.flatten(1), prepared(known)
    neurons = next(known.network.parameters()).shape[0]
    done = 2.0 * neurons * len(images) ** 2
    if not suits(known.descent, fixed):
        rare = images[:, fixed.pixels.seldom].count_nonzero()
        done = 4.0 * neurons * (len(images) * fixed.pixels.n_often(images) + int(rare))
    return {"plain": 4.0 * neurons * images.numel(), "done_batched": done}


def training(network: ReleasedNetwork, images: ImageSet, n: int, steps: int) -> tuple[KnownTraining, Tensor, ImageSet]:
    """A training on the first `n` images, initial weights, and own images that are not among those."""
    network.initialize(seeded_generator(0, "benchmark"))
    fixed, own = images.subset(torch.arange(n)), images.subset(torch.arange(n, n + _OWN))
    known = KnownTraining(network, fixed.pixels(), fixed.labels, GradientDescent(steps=steps))
    return known, flat_weights(network), own


def speed(images: ImageSet, n: int, steps: int, rounds: int, peak: float) -> Row:
    """Every way of training MLPs over the plain loop, for `n` known images."""
    known, start, own = training(ReleasedMLP(), images, n, min(steps, _WORK // n))
    sizes: dict[Execution, int] = {"loop": 2, "vmap": 8, "batched_mlp": 2 * chunk_size(known)}
    per_model = _timed(known, start, own, sizes, rounds)
    operations = arithmetic(known)
    fastest = min(per_model["batched_mlp"]) * peak
    return {
        **_row(images, known, sizes, per_model),
        "operations": operations,
        "share_of_peak": {
            "loop": round(operations["plain"] / (min(per_model["loop"]) * peak), 3),
            "hand_by_plain_arithmetic": round(operations["plain"] / fastest, 3),
            "hand_by_what_is_done": round(operations["done_batched"] / fastest, 3),
        },
    }


def convolutions(images: ImageSet, n: int, rounds: int) -> Row:
    """Convolutional networks by `vmap` over the plain loop; by hand there is none."""
    known, start, own = training(ReleasedCNN(), images, n, 2)
    sizes: dict[Execution, int] = {"loop": 1, "vmap": 4}
    return {"network": "cnn", **_row(images, known, sizes, _timed(known, start, own, sizes, rounds))}


def _timed(
    known: KnownTraining, start: Tensor, own: ImageSet, sizes: dict[Execution, int], rounds: int
) -> dict[str, list[float]]:
    pixels, labels = own.pixels(), own.labels
    variants: dict[str, Callable[[], Tensor]] = {
        way: partial(train_models, known, start, pixels[:size], labels[:size], way) for way, size in sizes.items()
    }
    spent = alternate(variants, rounds, time.process_time)
    return {way: [value / (size * known.n_steps) for value in spent[way]] for way, size in sizes.items()}


def _row(images: ImageSet, known: KnownTraining, sizes: dict[Execution, int], per_model: dict[str, list[float]]) -> Row:
    return {
        "images": images.name,
        "known_images": len(known.images),
        "steps": known.n_steps,
        "models": sizes,
        "ratio": ratios(per_model, "loop"),
        "seconds_per_model_and_step": {way: spread(values) for way, values in per_model.items()},
    }


def agreement(images: ImageSet, n: int, steps: int, models: int) -> Row:
    """How far off differences are from those of the loop in float64, relative to their norm; the median model."""
    known, start, own = training(ReleasedMLP(), images, n, steps)
    exact, pixels, labels = known.on("cpu", torch.float64), own.pixels()[:models], own.labels[:models]
    truth = train_models(exact, start.double(), pixels.double(), labels, "loop")
    norms = (truth - train_reference(known, start)).norm(dim=1)
    ways: tuple[Execution, ...] = ("loop", "batched_mlp")
    errors = {way: (train_models(known, start, pixels, labels, way) - truth).norm(dim=1) / norms for way in ways}
    return {
        "images": images.name,
        "known_images": n,
        "steps": steps,
        "models": models,
        "error_of_difference": {way: f"{float(error.median()):.1e}" for way, error in errors.items()},
    }


def memory(images: ImageSet, n: int, models: list[int]) -> list[Row]:
    """MiB at most above what the images take, for several numbers of models in a store."""
    images = images.subset(torch.arange(n + max(models)))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        used = pool.starmap(peak_mib, [(images, n, each) for each in models], chunksize=1)
    return [{"models": each, "peak_mib": round(mib, 1)} for each, mib in zip(models, used, strict=True)]


def peak_mib(images: ImageSet, n: int, models: int) -> float:
    """Memory that this process has taken at most since models began to be trained."""
    # Two steps hold all that a hundred hold.
    fixed, own = images.subset(torch.arange(n)), images.subset(torch.arange(n, n + models))
    plan = ShadowPlan(ReleasedMLP(), fixed, GradientDescent(steps=2))
    before = status_mib("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        store = ShadowStore.create(Path(folder), plan.description, "batched_mlp", _SHARD)
        for _ in plan.train_shards(store, range(-(-models // _SHARD)), own):
            pass
    return status_mib("VmHWM") - before


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of MNIST and CIFAR-10; default: random images only")
    parser.add_argument("--known", type=int, nargs="+", default=[500, 1_000, 10_000], help="sizes of the fixed set")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of training; fewer where images are many")
    parser.add_argument("--checked", type=int, default=3, help="models that are trained in float64, too")
    parser.add_argument("--memory", type=int, nargs="*", default=[10, 100, 1_000], help="numbers of models")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as every command does
    most, rounds = max(arguments.known) + _OWN, arguments.rounds
    digits, photos = [random_images((1, 28, 28), most)], random_images((3, 32, 32), 500 + _OWN)
    if arguments.root is not None:
        digits, photos = [MNIST(arguments.root).load()[0], *digits], CIFAR10(arguments.root).load()[0]
    with Record("shadows", vars(arguments)) as record:
        record.measure({"part": "peak"}, lambda: {"peak_gflops": round(peak_flops(rounds) / 1e9, 1)})
        peak = 1e9 * record.rows[0]["peak_gflops"]
        for images in digits:
            for n in arguments.known:
                own = {"part": "speed", "images": images.name, "known_images": n}
                record.measure(own, partial(speed, images, n, arguments.steps, rounds, peak))
        for n in arguments.known:
            own = {"part": "agreement", "known_images": n}
            record.measure(own, partial(agreement, digits[0], n, arguments.steps, arguments.checked))
        record.measure({"part": "convolutions"}, partial(convolutions, photos, 500, rounds))
        if arguments.memory:
            sizes = digits[0], max(arguments.known), arguments.memory
            record.measure({"part": "memory"}, lambda: {"memory": memory(*sizes)})


if __name__ == "__main__":
    main()
