"""What the Trainer adds to an attack iteration: the same attack under `trainer.test` and in a bare loop.

    python -m benchmarks.trainer [--rounds 7] [--steps 20] [--threads 1]

The two take turns in one process, on ResNet-18 and one image; setup and scoring do not count. In seconds of processor
time, as shares of a bare iteration:

between_iterations   what happens from the end of one iteration to the beginning of the next: progress, logging to CSV
                     every tenth iteration (a run of 4,800 logs every 24th), saving the running state every two seconds
                     (a run: every 60). This is the Trainer's own cost, and hardly noisy.
whole_iterations     how much longer iterations take from beginning to beginning. This would also show that the Trainer
                     slows down the attack itself, within the noise of the machine.

The process keeps the memory that it frees, see `lit_recon.training.trainer`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import lit_recon._torchvision

import torch
from torch import Tensor

from benchmarks.record import Record, Row, spread
from lit_recon.attacks.updates import GradientMatching, KnownLabels, Parametrization, Pixels, TotalVariation
from lit_recon.attacks.updates.gradient_matching.parametrizations import Restart, Variables
from lit_recon.clients import Client, ClientSettings
from lit_recon.data.sources import Digits
from lit_recon.metrics import metrics_of
from lit_recon.models import Backbone, ResNet18
from lit_recon.modules.data import VictimDataModule
from lit_recon.modules.loggers import WandbSettings, build_loggers
from lit_recon.modules.update_attack import UpdateAttackModule
from lit_recon.records import Knowledge, Observation
from lit_recon.training.trainer import TrainerSettings, build_trainer, keep_freed_memory

KNOWLEDGE = Knowledge(labels=True)
LOG_EVERY, SAVE_EVERY_SECONDS = 10, 2.0
TARGET = 0.03


class Timing(NamedTuple):
    """Of one run: seconds of every iteration to the beginning of the next, and of the part between the two."""

    whole: list[float]
    between: list[float]


class Timed(Parametrization):
    """A parametrization that notes when each iteration begins, by drawing images, and when it ends, by projecting."""

    def __init__(self, inner: Parametrization) -> None:
        self.inner, self.signed = inner, inner.signed
        self.began: list[float] = []
        self.ended: list[float] = []

    def start(self, restart: Restart) -> Variables:
        return self.inner.start(restart)

    def images(self, variables: Variables, restart: Restart) -> Tensor:
        self.began.append(time.process_time())
        return self.inner.images(variables, restart)

    def project(self, variables: Variables, observation: Observation) -> None:
        self.inner.project(variables, observation)
        self.ended.append(time.process_time())

    def take(self) -> Timing:
        """What was noted since the last call, but for the first iteration, which warms up.

        The attack's result draws images once more: the last iteration has a successor, too.
        """
        began, ended, self.began, self.ended = self.began, self.ended, [], []
        between = [after - before for before, after in zip(ended[1:], began[2:], strict=True)]
        return Timing([after - before for before, after in pairwise(began[1:])], between)


def measure(rounds: int, steps: int, width: int = 64) -> Row:
    """Overhead of the Trainer, as a share of a bare iteration."""
    victims = VictimDataModule(Digits(size=32), n_victims=1)
    torch.manual_seed(0)
    model = Backbone(ResNet18(victims.image_shape, width=width), victims.n_classes, victims.normalization).eval()
    timed = Timed(Pixels())
    attack = GradientMatching(
        priors=[TotalVariation(0.1)], parametrization=timed, labels=KnownLabels(), steps=steps, log_every=LOG_EVERY
    )
    ids = victims.batches[0]
    seen = Client(model).observe(victims.test.pixels(ids), victims.test.labels[ids], KNOWLEDGE)

    def bare() -> None:
        state = attack.init([seen])
        while state.step < attack.steps:
            attack.advance(state)
        attack.result(state)

    def under_trainer() -> None:
        with tempfile.TemporaryDirectory() as folder:
            loggers = build_loggers(Path(folder), "trainer", WandbSettings(mode="disabled"), {})
            metrics = metrics_of(["rmse", "psnr", "ssim"])
            module = UpdateAttackModule(
                attack, model, ClientSettings(), None, KNOWLEDGE, Path(folder), metrics, 1, SAVE_EVERY_SECONDS
            )
            build_trainer(TrainerSettings(accelerator="cpu"), loggers).test(module, datamodule=victims, verbose=False)

    variants = {"bare": bare, "trainer": under_trainer}
    timings: dict[str, list[Timing]] = {name: [] for name in variants}
    for counted in range(-1, rounds):
        # the order changes, so that a machine that slows down or speeds up favours neither
        for name in sorted(variants, reverse=counted % 2 == 1):
            variants[name]()
            timing = timed.take()
            if counted >= 0:
                timings[name].append(timing)
    pairs = list(zip(timings["bare"], timings["trainer"], strict=True))
    return {
        "between_iterations": spread(
            [(mean(ours.between) - mean(bare.between)) / mean(bare.whole) for bare, ours in pairs]
        ),
        "whole_iterations": spread([median(ours.whole) / median(bare.whole) - 1 for bare, ours in pairs]),
        "seconds": {name: spread([value for part in parts for value in part.whole]) for name, parts in timings.items()},
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="iterations per round, at least 3")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kept = keep_freed_memory()
    row = measure(arguments.rounds, arguments.steps)
    for name in ("between_iterations", "whole_iterations"):
        middle, least, most = (100 * row[name][key] for key in ("median", "min", "max"))
        print(f"{name:<20} {middle:.2f} % ({least:.2f} to {most:.2f}), target below {100 * TARGET:.0f} %")
    settings = {
        **vars(arguments),
        "log_every": LOG_EVERY,
        "save_every_seconds": SAVE_EVERY_SECONDS,
        "freed_memory_kept": kept,
    }
    with Record("trainer", settings) as record:
        record.add(row)


if __name__ == "__main__":
    main()
