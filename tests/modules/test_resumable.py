"""Killed anywhere and resumed, an attack ends with the bits of one that was left alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from lit_recon.attacks.base import Attack
from lit_recon.attacks.updates import (
    LBFGS,
    Adam,
    DeepImagePrior,
    GradientMatching,
    GroupConsistency,
    KnownLabels,
    MatchingState,
    TotalVariation,
)
from lit_recon.clients import Client
from lit_recon.errors import CorruptFileError
from lit_recon.models import MLP, Backbone
from lit_recon.modules.attack_state import AttackOutcome, run_attack
from lit_recon.records import Knowledge, Normalization, Observation, Reconstruction
from lit_recon.training.progress import Interrupted

STEPS = 8
Execution = Literal["loop", "vmap"] | None


def observations(n: int = 1) -> list[Observation]:
    torch.manual_seed(0)
    client = Client(Backbone(MLP((1, 8, 8), [16], activation="gelu"), 4, Normalization((0.5,), (0.25,))))
    images = torch.rand(n, 2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return [client.observe(batch, torch.tensor([1, 3]), Knowledge(labels=True)) for batch in images]


def matching(**settings: Any) -> GradientMatching:
    return GradientMatching(labels=KnownLabels(), steps=STEPS, log_every=1, **settings)


def run(
    attack: Attack,
    seen: Sequence[Observation],
    saved: Path,
    watch: Callable[[Any, int], None],
    execution: Execution = "loop",
    every: float = 1000.0,
) -> AttackOutcome:
    return run_attack(attack, seen, saved, every, execution, watch)


def ignore(state: MatchingState, new: int) -> None:
    """Watch nothing."""


ATTACKS: dict[str, Callable[[], GradientMatching]] = {
    "pixels": lambda: matching(priors=[TotalVariation(0.01)]),
    "restarts": lambda: matching(priors=[GroupConsistency(0.01, start=0.5)], restarts=2, keep="best"),
    "lbfgs": lambda: matching(solver=LBFGS(inner=3)),
    "network": lambda: matching(
        parametrization=DeepImagePrior(channels=4, multipliers=[1, 1], blocks_per_level=1, noise_channels=2),
        solver=Adam(lr=1e-3, signed=False),
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_attack_ends_with_the_same_bits(name: str, number: signal.Signals, tmp_path: Path) -> None:
    saved, seen = tmp_path / "victims.pt", observations(2)
    whole = run(ATTACKS[name](), seen, tmp_path / "other.pt", ignore)

    def interrupt(state: MatchingState, new: int) -> None:
        if state.step == 3 and new:
            signal.raise_signal(number)

    with pytest.raises(Interrupted, match=number.name):
        run(ATTACKS[name](), seen, saved, interrupt)
    counted: list[tuple[int, int]] = []
    resumed = run(ATTACKS[name](), observations(2), saved, lambda state, new: counted.append((state.step, new)))
    assert counted == [(3, 0)] + [(step, 1) for step in range(4, STEPS + 1)]
    for ours, theirs in zip(resumed.reconstructions, whole.reconstructions, strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
        assert ours.loss == theirs.loss
    assert resumed.curves == whole.curves
    assert [len(curves) for curves in resumed.curves] == [ATTACKS[name]().restarts] * 2


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_the_way_of_evaluation_is_the_one_asked_for(execution: Literal["loop", "vmap"], tmp_path: Path) -> None:
    used: list[str] = []
    run(
        matching(),
        observations(2),
        tmp_path / "x.pt",
        lambda state, _: used.append(state.matching.execution),
        execution,
    )
    assert set(used) == {execution}


def test_measuring_chooses_one_of_the_two() -> None:
    assert matching().measured_execution(observations(2)) in ("loop", "vmap")


def test_the_state_is_saved_as_often_as_asked_and_no_more(tmp_path: Path) -> None:
    saved, ages = tmp_path / "victims.pt", []

    def note(state: MatchingState, new: int) -> None:
        ages.append(saved.stat().st_mtime_ns if saved.is_file() else 0)

    run(matching(), observations(), saved, note, every=1e-9)
    assert len(set(ages)) == STEPS  # no file at the start and at the first iteration, a new one at every other
    saved.unlink()
    run(matching(), observations(), saved, note, every=1000.0)
    assert not saved.exists()


def test_time_counts_over_all_processes_and_leaves_out_first_iterations(tmp_path: Path) -> None:
    saved = tmp_path / "victims.pt"

    def interrupt(state: MatchingState, new: int) -> None:
        if state.step == 4 and new:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        run(matching(), observations(), saved, interrupt)
    before = torch.load(saved, weights_only=True)
    assert before["timed_steps"] == 3
    outcome = run(matching(), observations(), saved, ignore)
    assert outcome.timed_steps == 3 + 3
    assert outcome.seconds > before["seconds"] > before["timed_seconds"] > 0


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    saved = tmp_path / "victims.pt"
    saved.write_bytes(b"no state")
    with pytest.raises(CorruptFileError, match="delete it"):
        run(matching(), observations(), saved, ignore)


def test_a_state_of_another_attack_is_refused(tmp_path: Path) -> None:
    saved = tmp_path / "victims.pt"
    run(matching(), observations(2), saved, ignore, every=1e-9)
    with pytest.raises(CorruptFileError, match=r"victims\.pt"):
        run(matching(), observations(1), saved, ignore)


class Grey(Attack):
    """Returns grey images at once."""

    def run(self, observations: Sequence[Observation]) -> list[Reconstruction]:
        return [
            Reconstruction(
                torch.full((seen.n_examples, *seen.image_shape), 0.5), torch.zeros(seen.n_examples).long(), 1.0
            )
            for seen in observations
        ]


def test_an_attack_without_steps_runs_in_one_piece(tmp_path: Path) -> None:
    outcome = run(Grey(), observations(3), tmp_path / "x.pt", ignore)
    assert [float(result.images.mean()) for result in outcome.reconstructions] == [0.5] * 3
    assert outcome.curves == [[{}]] * 3
    assert outcome.timed_steps == 0
