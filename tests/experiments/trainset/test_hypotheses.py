"""Hypotheses about starts, against made cells whose answers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_recon.experiments.trainset.hypotheses import Answer, answers, table
from lit_recon.experiments.trainset.results import SeedMean, TrainsetGroup, TrainsetStudy
from lit_recon.experiments.trainset.score import SAME_POOL

STARTS = {
    "noise": {"class_path": "lit_recon.experiments.trainset.starts.NoiseStart", "init_args": {}},
    "other": {"class_path": "OtherPartitionStart", "init_args": {}},
    "mixture": {"class_path": "MixtureStart", "init_args": {"rest": "noise"}},
}


def restart(losses: list[float], ssim: float = 0.2, **others: Any) -> dict[str, Any]:
    return {
        "loss": losses[-1],
        "curve": {"loss": losses, "distance": losses},
        "scores": {"best_ssim": ssim},
        "stationarity": {"before": 2.0, "after": 1.0},
        "moved": 0.1,
        "to_member": 0.3,
        **others,
    }


def group(start: str, share: float, seeds: list[list[dict[str, Any]]], public: float = 0.3) -> TrainsetGroup:
    cells = [
        {
            "restarts": restarts,
            "baselines": {SAME_POOL: {"best_ssim": public}},
            "scores": {"best_ssim": max(one["scores"]["best_ssim"] for one in restarts)},
        }
        for restarts in seeds
    ]
    return TrainsetGroup("attack", start, share, "none", cells)


def study(*groups: TrainsetGroup) -> TrainsetStudy:
    return TrainsetStudy(Path(), {"starts": STARTS}, list(groups), {}, {}, {}, False)


def by_hypothesis(*groups: TrainsetGroup) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = {}
    for one in answers(study(*groups)):
        found.setdefault(one.hypothesis.partition(" ")[0], []).append(one)
    return found


SLOW = [10.0, 9.0, 8.0, 6.0, 0.5]
FAST = [10.0, 0.4, 0.4, 0.4, 0.4]


def test_real_starts_are_compared_by_their_speed_and_by_how_far_they_move() -> None:
    found = by_hypothesis(
        group("noise", 0, [[restart(SLOW)]] * 3), group("other", 0, [[restart(FAST), restart(FAST, moved=0.2)]] * 3)
    )
    speed, stay = found["Starts"]
    assert speed.difference.value == pytest.approx(1 - 1 / 4)  # the slow curve ends its fall with the last of 4 steps
    assert stay.difference.value == pytest.approx(0.3 - 0.15)
    assert speed.verdict == stay.verdict == "agrees"


def test_images_that_explain_the_weights_and_show_nobody() -> None:
    close = {"curve": {"loss": SLOW, "distance": [1.0, 0.05], "residual": [9.0, 4.0]}}
    seeds = [[restart(SLOW, **close)], [restart(SLOW, 0.25, **close)]]
    explained, unknown = by_hypothesis(group("noise", 0, seeds))["Random"]
    assert explained.difference.value == pytest.approx(0.1 - 0.05)
    assert unknown.difference.value == pytest.approx(0.3 - 0.225)
    assert (explained.verdict, unknown.verdict) == ("agrees", "undecided")  # 0.1 and 0.05: the interval contains 0


@pytest.mark.parametrize(
    ("residual", "left", "said"),
    # of the norm of the weights; the residual is its square, and says nothing at the start
    [([2448.0, 0.81], 0.9, "disagrees"), ([1.0, 0.0025], 0.05, "agrees")],
)
def test_weights_are_explained_by_what_is_left_of_their_norm(residual: list[float], left: float, said: str) -> None:
    own = restart(SLOW, curve={"loss": SLOW, "residual": residual})
    explained, _ = by_hypothesis(group("noise", 0, [[own]] * 2))["Random"]
    assert explained.difference.value == pytest.approx(0.1 - left)
    assert explained.verdict == said


def test_a_loss_that_ranks_reconstructions_contradicts_that_uncertainty_protects() -> None:
    ranked = [restart([1.0, 0.1 * place], 0.5 - 0.1 * place) for place in range(1, 5)]
    [found] = by_hypothesis(group("noise", 0, [ranked] * 2))["The"][:1]
    assert found.difference.value == pytest.approx(-0.5)
    assert found.verdict == "disagrees"
    assert "The" not in by_hypothesis(group("noise", 0, [ranked[:3]] * 2))


def test_landscapes_are_compared_near_the_truth() -> None:
    far = group("mixture", 0.25, [[restart([4.0, 1.0])]] * 2)
    near = group("mixture", 0.75, [[restart([3.0, 1.0], stationarity={"before": 0.5, "after": 0.1})]] * 2)
    truth = group("mixture", 1, [[restart([1.0, 1.0], stationarity={"before": 0.05, "after": 0.1})]] * 2)
    [found] = by_hypothesis(far, near, truth)["The"]
    assert found.difference.value == pytest.approx(3 / 4 - 0.5 / 2)
    assert found.verdict == "agrees"
    assert "75%" in found.compared
    moving = group("mixture", 1, [[restart([1.0], stationarity={"before": b, "after": 0.1})] for b in (0.05, 0.79)])
    [found] = by_hypothesis(far, near, moving)["The"]
    assert found.verdict == "not judged: the weights are not stationary, 0.79 at the training images"
    [found] = by_hypothesis(far, near)["The"]
    assert found.verdict.endswith("is not known, add the share 1 to the start")


@pytest.mark.parametrize(
    ("value", "half", "said"),
    [(0.2, 0.1, "agrees"), (-0.2, 0.1, "disagrees"), (0.2, 0.2, "undecided"), (0.2, None, "undecided")],
)
def test_an_answer_needs_an_interval_beside_zero(value: float, half: float | None, said: str) -> None:
    answer = Answer("It holds.", "attack", "one minus another", SeedMean(value, half))
    assert answer.verdict == said
    assert table([answer]).splitlines()[1].endswith(f",{said}")


def test_a_defense_costs_what_the_models_of_its_seeds_lost() -> None:
    """An attack may apply to some of them alone, and to none without a defense."""

    def cells(attack: str, defense: str, accuracies: dict[int, float]) -> TrainsetGroup:
        own = [{"seed": seed, "model": {"accuracy": accuracy}} for seed, accuracy in accuracies.items()]
        return TrainsetGroup(attack, "noise", 0.0, defense, own)

    defended, other = cells("one", "decay", {1: 0.6}), cells("two", "decay", {0: 0.85, 1: 0.6})
    without = cells("one", "none", {0: 0.9, 1: 0.7})
    found = study(without, defended, other)
    assert [found.cost(group) for group in found.groups] == pytest.approx([0.0, 0.1, 0.075])
    assert study(defended).cost(defended) is None
