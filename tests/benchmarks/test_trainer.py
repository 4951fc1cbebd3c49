from __future__ import annotations

import pytest
import torch

from benchmarks.trainer import Timed, Timing, measure
from benchmarks.workload import Workload
from lit_recon.attacks.updates import GradientMatching, KnownLabels, Pixels


def test_every_iteration_after_the_first_is_timed_in_both_forms() -> None:
    row = measure(rounds=1, steps=4, width=2)

    assert {name: part["n"] for name, part in row["seconds"].items()} == {"bare": 3, "trainer": 3}
    assert row["between_iterations"]["n"] == row["whole_iterations"]["n"] == 1


def test_what_the_trainer_adds_is_a_share_of_a_bare_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up, bare, trainer = Timing([9.0], [9.0]), Timing([2.0, 2.0], [0.25, 0.25]), Timing([3.0, 3.0], [0.75, 0.75])
    timings = iter([warm_up, warm_up, bare, trainer])
    monkeypatch.setattr(Timed, "take", lambda _: next(timings))
    row = measure(rounds=1, steps=1, width=2)
    assert (row["between_iterations"]["median"], row["whole_iterations"]["median"]) == (0.25, 0.5)


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
