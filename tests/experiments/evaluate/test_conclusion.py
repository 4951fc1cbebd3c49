"""Comparisons in sentences, and what is missing in a grid."""

from __future__ import annotations

from typing import Any

import pytest

from lit_recon.experiments.evaluate.comparison import DefenseComparison, sides_of
from lit_recon.experiments.evaluate.conclusion import GridNames, conclude, missing
from lit_recon.experiments.evaluate.equal_utility import Protection

NAMES = GridNames(
    {"clip": "clipping", "noise": "Gaussian noise"},
    {"own": "exact maps", "other": "inversion"},
    {"clip": [8.0, 4.0], "noise": [0.1, 0.2, 0.3]},
    "RMSE",
    lambda value: f"{value:.2f}",
)
SIDES = sides_of(NAMES.attacks, ["bad"], ["own"])


def protection(value: float, best: float = 0.5, strengths: Any = (0.1,), sure: bool = True) -> Protection:
    return Protection(value, (value, value) if sure else None, strengths, False, best)


def compared(side: int = 1, futile: bool = False, **found: list[Protection]) -> DefenseComparison:
    """At losses of 1 point and of 5 points."""
    lines = {limit: {name: own[place] for name, own in found.items()} for place, limit in enumerate((0.01, 0.05))}
    return DefenseComparison(1, SIDES[side], lines, 0.1, futile)


def test_the_best_defense_is_named_for_every_loss() -> None:
    noise = [protection(0.3, 0.9), protection(0.4, 0.98)]
    both = compared(clip=[protection(0.2), protection(0.2)], noise=noise)
    assert conclude(NAMES, both) == (
        "Against honest servers, Gaussian noise protects best at a cost of at most 1 point (RMSE 0.30, best in 90 % of "
        "the draws) and 5 points (0.40, best in 98 %); without a defense RMSE is 0.10."
    ).replace(" %", "\N{NO-BREAK SPACE}%")


def test_a_defense_that_is_best_in_more_of_the_draws_is_named_beside_the_best_mean() -> None:
    noise = [protection(0.3, 0.9), protection(0.4, 0.35)]
    both = compared(clip=[protection(0.2, 0.1), protection(0.39, 0.65)], noise=noise)
    assert conclude(NAMES, both) == (
        "Against honest servers, Gaussian noise protects best at a cost of at most 1 point (RMSE 0.30, best in 90 % of "
        "the draws) and 5 points (0.40, best in 35 %, clipping in 65 %); without a defense RMSE is 0.10."
    ).replace(" %", "\N{NO-BREAK SPACE}%")


def test_where_another_defense_or_none_is_best_it_is_said() -> None:
    nothing = protection(0.1, strengths=(None,))
    found = compared(clip=[nothing, protection(0.2, sure=False)], noise=[nothing, nothing])
    assert conclude(NAMES, found) == (
        "Against honest servers, no defense does better than none at a cost of at most 1 point; clipping protects best "
        "at a cost of at most 5 points (RMSE 0.20); without a defense RMSE is 0.10."
    )


def test_honest_servers_are_told_apart_by_what_they_know() -> None:
    titles = {"own": "exact maps", "other": "inversion", "bad": "Robbing the Fed"}
    sides = sides_of(titles, ["bad"], ["own"], ["other"])
    assert [(side.title, {*side.barred}) for side in sides] == [
        ("any server", set()),
        ("honest servers", {"bad"}),
        ("honest servers without batch statistics", {"bad", "other"}),
        ("honest servers, without exact maps", {"bad", "own"}),
    ]
    # a malicious server's statistics change nothing among honest ones
    assert len(sides_of(titles, ["bad"], ["own"], ["bad"])) == 3


def test_a_single_defense_is_not_called_the_best() -> None:
    found = compared(2, clip=[protection(0.1, strengths=(None,)), protection(0.2, 1.0)])
    assert conclude(NAMES, found) == (
        "Without exact maps the conclusion for honest servers would be: clipping, the only defense compared, does no "
        "better than none at a cost of at most 1 point; it does better than none at a cost of at most 5 points (RMSE "
        "0.20); without a defense RMSE is 0.10."
    )


def test_attacks_that_fail_without_a_defense_tell_nothing() -> None:
    said = conclude(NAMES, compared(0, futile=True, clip=[protection(0.2), protection(0.2)]))
    assert said == (
        "Against any server, nothing is known: without a defense no attack is better than the nearest public image."
    )


def cells(**without_result: dict[str, str]) -> list[dict[str, Any]]:
    """A row of every attack at every strength; `defense_strength_attack` have the entries given."""
    levels = [("none", None), *((name, value) for name, values in NAMES.strengths.items() for value in values)]
    rows = []
    for name, value in levels:
        for attack in NAMES.attacks:
            other = without_result.get(f"{name}_{value}_{attack}".replace(".", ""), {"rmse": 0.1})
            rows.append({"defense": name, "strength": value, "attack": attack, **other})
    return rows


@pytest.fixture
def trainings() -> list[dict[str, Any]]:
    return [row for row in cells() if row["attack"] == "own"]


def test_strengths_without_results_are_named(trainings: list[dict[str, Any]]) -> None:
    left, never = {"reason": "not run yet", "applicable": "true"}, {"reason": "no layer", "applicable": "false"}
    assert missing(NAMES, trainings, cells()) == []
    assert missing(NAMES, trainings, cells(noise_02_own=never)) == []
    part = cells(noise_01_own=left, noise_01_other=left, noise_03_own=left, noise_03_other=left, clip_80_other=left)
    assert missing(NAMES, trainings, part) == [
        "Not measured yet: Gaussian noise 0.1 and 0.3.",
        "Incomplete: clipping 8 (inversion missing).",
    ]
    clipped = [row for row in cells() if row["defense"] != "clip"]
    assert missing(NAMES, trainings, clipped) == ["Not measured yet: clipping."]
    assert missing(NAMES, trainings[:1], cells(none_None_own=left)) == [
        "Incomplete: no defense (exact maps missing); clipping (accuracy missing); Gaussian noise (accuracy missing)."
    ]
