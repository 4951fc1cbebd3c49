"""Cost of one attack iteration over one forward and backward pass of the same network and batch.

    python -m benchmarks.iteration [--batches 1 8] [--rounds 15] [--compiled] [--threads 1]

The variants run in turn in one process and are compared round by round in seconds of processor time. An iteration is
everything: the candidate's update, its distance, total variation, the derivative, sign-Adam, box and book-keeping.
"""

from __future__ import annotations

import argparse
import time

import lit_recon._torchvision

import torch
from torch import nn

from benchmarks.record import alternate, ratios, spread, write_record
from lit_recon.inversion import GradientMatching, KnownLabels, TotalVariation
from lit_recon.models import Backbone, ResNet18
from lit_recon.observation import Client
from lit_recon.records import Knowledge, Normalization


def measure(batch: int, mode: str, rounds: int, compiled: bool) -> dict[str, object]:
    """Ratios at one batch size and BatchNorm mode."""
    torch.manual_seed(0)
    model = Backbone(ResNet18(), 10, Normalization((0.49, 0.48, 0.45), (0.25, 0.24, 0.26)))
    images, labels = torch.rand(batch, 3, 32, 32), torch.arange(batch) % 10
    seen = Client(model, mode).observe(images, labels, Knowledge(labels=True))
    model.train(mode == "train")

    def forward_backward() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels).backward()

    variants = {"forward_backward": forward_backward}
    for compilation in ("none", "default") if compiled else ("none",):
        attack = GradientMatching(
            priors=[TotalVariation(0.1)], labels=KnownLabels(), steps=10_000, compilation=compilation
        )
        state = attack.init([seen])
        variants["eager" if compilation == "none" else "compiled"] = lambda a=attack, s=state: a.step(s)
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
    rows = []
    for mode in arguments.modes:
        for batch in arguments.batches:
            rows.append(measure(batch, mode, arguments.rounds, arguments.compiled))
            print(mode, batch, rows[-1]["ratio"], flush=True)
    print(write_record("iteration", vars(arguments), rows))


if __name__ == "__main__":
    main()
