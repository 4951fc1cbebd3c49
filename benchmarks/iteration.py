"""Cost of one attack iteration over one forward and backward pass of the same network and batch.

    python -m benchmarks.iteration [--batches 1 8] [--rounds 15] [--compiled] [--threads 1]

The variants run in turn in one process and are compared round by round in seconds of processor time. An iteration is
everything: the candidate's update, its distance, total variation, the derivative, sign-Adam, box and book-keeping.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import lit_recon._torchvision

import torch

from benchmarks.record import Record, Row, alternate, ratios, spread
from benchmarks.workload import Workload
from lit_recon.attacks.updates.gradient_matching.matching import Compilation
from lit_recon.clients import BatchNormMode
from lit_recon.training.trainer import keep_freed_memory


def measure(batch: int, mode: BatchNormMode, rounds: int, compiled: bool, width: int = 64) -> Row:
    """Ratios at one batch size and BatchNorm mode."""
    workload = Workload.build(batch, mode, width=width)
    variants: dict[str, Callable[[], None]] = {"forward_backward": workload.forward_backward}
    compilations: tuple[Compilation, ...] = ("none", "default") if compiled else ("none",)
    for compilation in compilations:
        attack, state = workload.attack(compilation=compilation)
        variants["eager" if compilation == "none" else "compiled"] = partial(attack.step, state)
    start = time.perf_counter()
    for run in variants.values():
        run()
    setup = time.perf_counter() - start
    seconds = alternate(variants, rounds, time.process_time)
    return {
        "batch": batch,
        "batch_norm": mode,
        "ratio": ratios(seconds, "forward_backward"),
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "first_calls_seconds": round(setup, 1),
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--modes", nargs="+", default=["eval", "train"], choices=["eval", "train"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="also torch.compile; takes minutes before it starts")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as every command does
    with Record("iteration", vars(arguments)) as record:
        for mode in arguments.modes:
            for batch in arguments.batches:
                own = {"batch": batch, "batch_norm": mode}
                record.measure(own, partial(measure, batch, mode, arguments.rounds, arguments.compiled))


if __name__ == "__main__":
    main()
