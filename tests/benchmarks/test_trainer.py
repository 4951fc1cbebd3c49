from __future__ import annotations

import torch

from benchmarks.trainer import Timed, measure
from benchmarks.workload import Workload
from lit_recon.attacks.updates import GradientMatching, KnownLabels, Pixels


def test_every_iteration_after_the_first_is_timed_in_both_forms() -> None:
    row = measure(rounds=1, steps=4, width=2)

    assert {name: part["n"] for name, part in row["seconds"].items()} == {"bare": 3, "trainer": 3}
    assert row["between_iterations"]["n"] == row["whole_iterations"]["n"] == 1
    # a difference of two measured times, which a busy machine may turn around
    assert -1 < row["between_iterations"]["median"] < 1, "the Trainer costs less than an iteration"


def test_timing_changes_nothing() -> None:
    seen = Workload.build(batch=1, width=2).observations
    timed = Timed(Pixels())

    watched, plain = (
        GradientMatching(parametrization=inside, labels=KnownLabels(), steps=3)(seen[0]) for inside in (timed, Pixels())
    )

    assert torch.equal(watched.images, plain.images)
    whole, between = timed.take()
    assert (len(whole), len(between)) == (2, 2)
    assert all(0 <= part <= iteration for iteration, part in zip(whole, between, strict=True))
    assert timed.began == timed.ended == []
