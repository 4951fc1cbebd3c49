"""What the Trainer adds to an attack iteration: the same attack under `trainer.test` and in a bare loop.

    python -m benchmarks.trainer [--rounds 7] [--steps 20] [--threads 1]

The two take turns in one process, on ResNet-18 and one image. Only iterations are timed, in seconds of processor time
from within one to within the next, so that setup and scoring do not count, while whatever the Trainer does between two
iterations does: progress, logging to CSV every tenth iteration (a run of 4,800 logs every 24th), and saving the running
state every two seconds (a run: every 60). The process keeps the memory that it frees, see `benchmarks.allocator`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import lit_recon._torchvision

import torch
from torch import Tensor

from benchmarks.allocator import keep_freed_memory
from benchmarks.record import Row, spread, write_record
from lit_recon.data import Digits
from lit_recon.inversion import Adam, GradientMatching, KnownLabels, Solver, TotalVariation
from lit_recon.metrics import Unavailable
from lit_recon.models import Backbone, ResNet18
from lit_recon.modules.data import VictimDataModule
from lit_recon.modules.inversion import InversionModule
from lit_recon.modules.loggers import WandbSettings, build_loggers
from lit_recon.modules.trainer import TrainerSettings, build_trainer
from lit_recon.observation import Client
from lit_recon.records import Knowledge

KNOWLEDGE = Knowledge(labels=True)
LOG_EVERY, SAVE_EVERY_SECONDS = 10, 2.0
TARGET = 0.03


class Timed(Solver):
    """A solver that notes when its step begins, which is once per iteration of one problem."""

    def __init__(self, inner: Solver) -> None:
        super().__init__(inner.lr)
        self.inner = inner
        self.began: list[float] = []

    def optimizer(self, variables: dict[str, Tensor]) -> torch.optim.Optimizer:
        return self.inner.optimizer(variables)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        variables: dict[str, Tensor],
        signed: tuple[str, ...],
        progress: float,
        evaluate: Callable[[], Tensor],
    ) -> None:
        self.began.append(time.process_time())
        self.inner.step(optimizer, variables, signed, progress, evaluate)

    def iterations(self) -> list[float]:
        """Seconds of the iterations noted so far, but for the first, which warms up; forgets them."""
        began, self.began = self.began, []
        return [after - before for before, after in pairwise(began[1:])]


def measure(rounds: int, steps: int, width: int = 64) -> Row:
    """Overhead of the Trainer, as a share of a bare iteration."""
    victims = VictimDataModule(Digits(size=32), n_victims=1)
    torch.manual_seed(0)
    model = Backbone(ResNet18(victims.image_shape, width=width), victims.n_classes, victims.normalization).eval()
    solver = Timed(Adam())
    attack = GradientMatching(
        priors=[TotalVariation(0.1)], solver=solver, labels=KnownLabels(), steps=steps, log_every=LOG_EVERY
    )
    ids = victims.batches[0]
    seen = Client(model).observe(victims.test.pixels(ids), victims.test.labels[ids], KNOWLEDGE)

    def bare() -> None:
        state = attack.init([seen])
        while state.step < attack.steps:
            attack.step(state)
        attack.result(state)

    def under_trainer() -> None:
        with tempfile.TemporaryDirectory() as folder:
            loggers = build_loggers(Path(folder), "trainer", WandbSettings(mode="disabled"), {})
            lpips = Unavailable("not asked for")
            module = InversionModule(
                attack, model, "eval", KNOWLEDGE, Path(folder), lpips, together=1, save_every_seconds=SAVE_EVERY_SECONDS
            )
            build_trainer(TrainerSettings(accelerator="cpu"), loggers).test(module, datamodule=victims, verbose=False)

    variants = {"bare": bare, "trainer": under_trainer}
    seconds: dict[str, list[list[float]]] = {name: [] for name in variants}
    for counted in range(-1, rounds):
        # the order changes, so that a machine that slows down or speeds up favours neither
        for name in sorted(variants, reverse=counted % 2 == 1):
            variants[name]()
            iterations = solver.iterations()
            if counted >= 0:
                seconds[name].append(iterations)
    return {
        "overhead_of_means": _overhead(seconds, statistics.mean),
        "overhead_of_medians": _overhead(seconds, statistics.median),
        "seconds": {name: spread([value for part in parts for value in part]) for name, parts in seconds.items()},
    }


def _overhead(seconds: dict[str, list[list[float]]], center: Callable[[list[float]], float]) -> dict[str, float]:
    """Spread over rounds of the Trainer's share on top of a bare iteration."""
    pairs = zip(seconds["trainer"], seconds["bare"], strict=True)
    return spread([center(trainer) / center(bare) - 1 for trainer, bare in pairs])


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
    for name in ("overhead_of_means", "overhead_of_medians"):
        median, least, most = (100 * row[name][key] for key in ("median", "min", "max"))
        print(f"{name:<20} {median:.2f} % ({least:.2f} to {most:.2f}), target below {100 * TARGET:.0f} %")
    settings = {
        **vars(arguments),
        "log_every": LOG_EVERY,
        "save_every_seconds": SAVE_EVERY_SECONDS,
        "freed_memory_kept": kept,
    }
    print(write_record("trainer", settings, [row]))


if __name__ == "__main__":
    main()
