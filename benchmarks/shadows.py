"""Time of a shadow model trained each way over that of the plain loop of `torch.optim.SGD`, with the same data.

    python -m benchmarks.shadows [--known 500 10000] [--rounds 5] [--steps 5] [--threads 1]

The ways run in turn in one process and are compared round by round in seconds of processor time per model and step.
Beside the ratios stands the share of the fastest matrix product of this machine that the arithmetic alone would need.
Images are random: what they show changes no time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import lit_recon._torchvision

import torch
from torch import Tensor

from benchmarks.record import Row, alternate, ratios, spread, write_record
from lit_recon.data.seeding import seeded_generator
from lit_recon.informed.shadow import Execution, GradientDescent, KnownTraining, train_models
from lit_recon.informed.shadow.by_hand import chunk_size
from lit_recon.informed.shadow.products import times_transposed
from lit_recon.informed.shadow.training import flat_weights
from lit_recon.models.released import ReleasedMLP
from lit_recon.modules.allocator import keep_freed_memory


def peak_flops(rounds: int) -> float:
    """Floating-point operations per second of processor time of a large float32 product; the best of some rounds."""
    a, b = torch.randn(320, 784), torch.randn(10_000, 784)
    with torch.no_grad():
        seconds = alternate({"product": lambda: times_transposed(a, b)}, max(rounds, 3), time.process_time)["product"]
    return 2 * a.numel() * len(b) / max(min(seconds), 1e-9)


def measure(n: int, steps: int, rounds: int, peak: float) -> Row:
    """Ratios for a fixed set of `n` images; MLP 784-10-10 with ELU."""
    generator = seeded_generator(0, "benchmark")
    images, labels = torch.rand(n, 1, 28, 28, generator=generator), torch.randint(10, (n,), generator=generator)
    network = ReleasedMLP()
    network.initialize(generator)
    start, known = flat_weights(network), KnownTraining(network, images, labels, GradientDescent(steps=steps))
    sizes: dict[Execution, int] = {"loop": 2, "vmap": min(32, n), "hand": chunk_size(known)}
    variants: dict[str, Callable[[], Tensor]] = {
        way: partial(train_models, known, start, images[:size], labels[:size], way) for way, size in sizes.items()
    }
    spent = alternate(variants, rounds, time.process_time)
    per_model = {way: [value / (sizes[way] * steps) for value in spent[way]] for way in sizes}
    # Two products of 784 by 10 per image and step; the other layers are a hundredth of it.
    flops = 4 * n * 784 * 10
    return {
        "known_images": n,
        "models_at_once": sizes,
        "ratio": ratios(per_model, "loop"),
        "seconds_per_model_and_step": {way: spread(values) for way, values in per_model.items()},
        "share_of_peak": {way: round(flops / (min(values) * peak), 3) for way, values in per_model.items()},
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--known", type=int, nargs="+", default=[500, 1_000, 10_000], help="sizes of the fixed set")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of training, per round")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as every command does
    peak = peak_flops(arguments.rounds)
    rows: list[Row] = [{"peak_gflops": round(peak / 1e9, 1)}]
    for n in arguments.known:
        rows.append(measure(n, arguments.steps, arguments.rounds, peak))
        print(n, rows[-1]["ratio"], rows[-1]["share_of_peak"], flush=True)
    print(write_record("shadows", vars(arguments), rows))


if __name__ == "__main__":
    main()
