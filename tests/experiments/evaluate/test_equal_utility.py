"""Protection at a limit to the loss: lines between strengths, intervals, and shares of draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from lit_recon.experiments.evaluate.equal_utility import Strength, compare, strengths_of


def line(*points: tuple[float, float], value: float = 1.0) -> list[Strength]:
    """A defense with one training and two equal batches at each point of loss and metric; first of no defense."""
    return [Strength(None if n == 0 else value * n, [x], {"one": [y, y]}) for n, (x, y) in enumerate(points)]


@pytest.mark.parametrize("limit", [0.0, 0.004, 0.01, 0.015, 0.02, 0.03, 0.5])
@pytest.mark.parametrize(
    "points",
    [
        [(0.0, 0.1), (0.01, 0.2), (0.02, 0.15), (0.05, 0.4)],
        [(0.0, 0.1), (-0.01, 0.12), (0.03, 0.3), (0.012, 0.31)],  # gains accuracy, then costs more at less strength
        [(0.0, 0.3), (0.01, 0.2)],  # protects worse than none
    ],
)
def test_lines_between_strengths_agree_with_a_search_along_them(
    points: list[tuple[float, float]], limit: float
) -> None:
    (own,) = compare({"d": line(*points)}, limit).values()
    xs, ys = zip(*points, strict=True)
    places = np.linspace(0, len(points) - 1, 300_001)
    losses, scores = (np.interp(places, range(len(points)), values) for values in (xs, ys))
    assert own.value == pytest.approx(scores[losses <= limit + 1e-9].max(), abs=1e-5)


def test_the_strengths_around_the_limit_are_named() -> None:
    points = line((0.0, 0.1), (0.01, 0.2), (0.03, 0.4))
    places = {limit: compare({"d": points}, limit)["d"] for limit in (0.0, 0.005, 0.01, 0.02, 0.04)}
    assert [own.strengths for own in places.values()] == [(None,), (None, 1.0), (1.0,), (1.0, 2.0), (2.0,)]
    assert [own.ends for own in places.values()] == [False, False, False, False, True]


def test_an_interval_is_students() -> None:
    batches = [0.10, 0.14, 0.11, 0.19, 0.16]
    points = [Strength(None, [0.0], {"one": [0.0] * 5}), Strength(1.0, [0.0], {"one": batches})]
    interval = compare({"d": points}, 0.1)["d"].interval
    assert interval is not None
    expected = stats.t.interval(0.9, 4, np.mean(batches), stats.sem(batches))
    # 4,000 draws: a quantile's error is below a tenth of the interval's half length
    assert interval == pytest.approx(expected, abs=0.1 * (expected[1] - expected[0]) / 2)


def test_batches_are_the_same_for_all_defenses() -> None:
    """Images that differ much more than defenses do: the difference is still certain."""
    batches = np.array([0.1, 0.5, 0.9, 0.3])
    none = Strength(None, [0.0], {"one": list(batches - 5)})
    better, worse = (Strength(1.0, [0.0], {"one": list(batches + shift)}) for shift in (0.01, 0.0))
    found = compare({"better": [none, better], "worse": [none, worse]}, 0.1)
    assert found["better"].best == 1.0
    assert found["worse"].best == 0.0
    other = Strength(1.0, [0.0], {"one": list(batches[::-1])})  # as large on average, by other images
    found = compare({"better": [none, better], "other": [none, other]}, 0.1)
    assert 0.4 < found["other"].best < 0.6


def test_the_spread_of_seeds_is_carried_to_the_metric() -> None:
    """At the limit of 1 point the line rises by 10 a point; losses vary by half a point."""
    steep = [Strength(None, [0.0], {"one": [0.0, 0.0]}), Strength(1.0, [0.015, 0.025], {"one": [0.2, 0.2]})]
    (own,) = compare({"d": steep}, 0.01).values()
    assert own.value == pytest.approx(0.1)
    assert own.interval is not None
    drawn = 0.02 + stats.t.ppf([0.95, 0.05], 1) * 0.005  # the mean of two seeds, one degree of freedom
    ends = [0.2 * min(1.0, 0.01 / loss) if loss > 0 else 0.2 for loss in drawn]
    assert own.interval == pytest.approx(tuple(ends), rel=0.1)
    exact = [steep[0], Strength(1.0, [0.02], steep[1].scores)]
    assert compare({"d": exact}, 0.01)["d"].interval == pytest.approx((0.1, 0.1))


def test_the_strongest_attack_counts_in_every_draw() -> None:
    none = Strength(None, [0.0], {"one": [0.0] * 4, "two": [0.0] * 4})
    own = Strength(1.0, [0.0], {"one": [0.1, 0.3, 0.1, 0.3], "two": [0.3, 0.1, 0.3, 0.1]})
    found = compare({"d": [none, own]}, 0.1)["d"]
    assert found.value == pytest.approx(0.2)
    assert found.interval is not None
    assert found.interval[1] <= 0.2 + 1e-9  # whichever batches weigh more, one of the attacks does better than its mean


def test_strengths_stand_in_the_order_of_the_grid() -> None:
    rows: list[dict[str, Any]] = [{"defense": "none", "repetition": 0, "accuracy": 0.9, "attack": "a", "value": 0.1}]
    rows += [{**rows[0], "defense": "clip", "strength": bound} for bound in (2.0, 8.0, 4.0)]  # measured in any order
    found = strengths_of({"clip": [8.0, 4.0, 2.0]}, rows, rows, sign=1)
    assert [one.value for one in found["clip"]] == [None, 8.0, 4.0, 2.0]


def test_a_line_ends_at_the_last_strength_of_the_grid_alone() -> None:
    """A larger strength whose training diverged, or that was not attacked, may cost less or more than the limit."""
    rows: list[dict[str, Any]] = [{"defense": "none", "repetition": 0, "accuracy": 0.9, "attack": "a", "value": 0.1}]
    rows += [{**rows[0], "defense": "noise", "strength": std, "value": std} for std in (0.2, 0.3)]
    for strengths, others, ends in ([0.2, 0.3], [], True), ([0.2, 0.3, 0.4], ["value"], False), ([], [], False):
        attacked = [*rows, *({**rows[0], "defense": "noise", "strength": 0.4} for _ in others)]
        assert compare(strengths_of({"noise": strengths}, rows, attacked, sign=1), 0.1)["noise"].ends == ends


def test_a_strength_that_leaves_no_attack_counts_as_the_mean_public_image() -> None:
    """Without its metric the strength is left out, and ">" says that it may protect better."""
    rows: list[dict[str, Any]] = [{"defense": "none", "repetition": 0, "accuracy": 0.9, "attack": "a", "value": 0.1}]
    noise = {**rows[0], "defense": "noise"}
    trainings = [*rows, {**noise, "strength": 0.2}, {**noise, "strength": 0.3, "accuracy": 0.85}]
    attacked = [*rows, {**noise, "strength": 0.2, "value": 0.2}]
    for guess, value, place in ([0.3, 0.5], 0.4, (0.3,)), ([], 0.2, (0.2,)):
        for sign in (1, -1):
            lines = strengths_of({"noise": [0.2, 0.3]}, trainings, attacked, sign, [("noise", 0.3)], guess)
            assert lines["noise"][-1].strongest == pytest.approx(sign * value)
            assert lines["noise"][-1].is_last
            if sign == 1:
                found = compare(lines, 0.1)["noise"]
                assert (found.value, found.strengths, found.ends) == (pytest.approx(value), place, True)


def test_one_batch_gives_no_interval() -> None:
    points = [Strength(None, [0.0], {"one": [0.1]}), Strength(1.0, [0.0], {"one": [0.2]})]
    assert compare({"d": points}, 0.1)["d"].interval is None


def test_rows_of_tables_become_strengths() -> None:
    """Losses are between trainings of one seed; strengths without training or attack are left out."""
    none = {"defense": "none"}
    noise = [{"defense": "noise", "strength": value} for value in (0.1, 0.2, 0.3)]
    trainings = [
        *({**none, "repetition": n, "accuracy": value} for n, value in enumerate((0.9, 0.8))),
        *({**noise[0], "repetition": n, "accuracy": value} for n, value in enumerate((0.85, 0.7, 0.1))),
        {**noise[1], "repetition": 0, "accuracy": 0.6},
    ]
    batches = [{**own, "attack": "a", "value": 30.0} for own in (none, noise[0], noise[0], noise[2])]
    batches.append({**noise[0], "attack": "a", "aware": "false", "value": 20.0})
    trainings.append({"defense": "other", "strength": 0.1, "repetition": 0, "accuracy": 0.5})
    batches.append({"defense": "other", "strength": 0.1, "attack": "a", "value": 10.0})
    found = strengths_of({"noise": [0.3, 0.1, 0.2], "other": [0.1], "never": []}, trainings, batches, sign=-1)
    (first, second), (_, other), (alone,) = found.values()
    assert [*found] == ["noise", "other", "never"]
    assert alone == first
    assert (other.value, [*other.scores.values()]) == (0.1, [[-10.0]])
    assert (first.value, first.losses) == (None, [0.0, 0.0])
    assert (second.value, second.losses) == (0.1, pytest.approx([0.05, 0.1]))
    assert list(second.scores.values()) == [[-30.0, -30.0], [-20.0]]  # whether the defense is known or not
    assert compare({"noise": [second]}, 0.1) == {}  # without a beginning there is no line
