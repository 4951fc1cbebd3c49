from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, mannwhitneyu, norm

from lit_recon.errors import ShapeError
from lit_recon.metrics.membership import Array, advantage, area_under_roc, true_positive_rate


def _scores(shift: float, n: int, seed: int = 0) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    members = np.repeat([0, 1], n)
    return random.normal(size=2 * n) + shift * members, members


def test_area_is_the_statistic_of_mann_and_whitney() -> None:
    scores, members = _scores(0.8, 40)
    expected = mannwhitneyu(scores[members == 1], scores[members == 0]).statistic / 1600
    found = area_under_roc(scores, members)
    assert found.value == pytest.approx(expected, rel=1e-12)
    assert found.low < found.value < found.high


def test_the_interval_solves_the_equation_of_the_score_test() -> None:
    scores, members = _scores(0.8, 40)
    value, *ends = area_under_roc(scores, members)
    for theta in ends:
        # Hanley and McNeil 1982 with exponential scores, sizes of both kinds replaced by their mean.
        q1, q2 = theta / (2 - theta), 2 * theta**2 / (1 + theta)
        variance = (theta * (1 - theta) + 39 * (q1 - theta**2) + 39 * (q2 - theta**2)) / 1600
        assert abs(value - theta) / variance**0.5 == pytest.approx(norm.ppf(0.975), rel=1e-6)


def test_the_interval_covers_the_truth() -> None:
    truth = norm.cdf(1 / 2**0.5)
    intervals = [area_under_roc(*_scores(1.0, 30, seed)) for seed in range(200)]
    covered = np.mean([low <= truth <= high for _, low, high in intervals])
    assert 0.9 <= covered <= 0.99  # three standard errors around 0.95


def test_certainty_has_an_interval_too() -> None:
    scores, members = _scores(100.0, 20)
    value, low, high = area_under_roc(scores, members)
    assert (value, high) == (1, 1)
    assert 0.8 < low < 0.99
    value, low, high = area_under_roc(-scores, members)
    assert (value, low) == (0, 0)
    assert 0.01 < high < 0.2
    found = true_positive_rate(scores, members, 0.0)
    assert found.value == 1
    assert found.low == pytest.approx(0.025 ** (1 / 20))


def test_advantage_is_twice_the_share_of_right_guesses_less_one() -> None:
    scores, members = np.array([-1.0, 2.0, 0.5, -0.1, 3.0, 0.0]), np.array([0, 0, 1, 1, 1, 0])
    value, low, high = advantage(scores, members)
    assert value == pytest.approx(2 * 4 / 6 - 1)
    assert low == pytest.approx(2 * beta.ppf(0.025, 4, 3) - 1)
    assert high == pytest.approx(2 * beta.ppf(0.975, 5, 2) - 1)


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 0.25), (0.3, 0.75), (0.5, 0.75), (1.0, 1.0)])
def test_finds_at_a_rate_of_false_alarms(rate: float, expected: float) -> None:
    members = np.array([1, 0, 1, 1, 0, 0, 1, 0])
    scores = -np.arange(8.0)
    assert true_positive_rate(scores, members, rate).value == expected


@pytest.mark.parametrize(
    ("scores", "members"),
    [
        ([1.0, 2.0], [1, 1]),
        ([1.0, 2.0], [0, 2]),
        ([1.0, float("nan")], [0, 1]),
        ([1.0], [0, 1]),
    ],
)
def test_what_cannot_be_judged_is_refused(scores: list[float], members: list[int]) -> None:
    with pytest.raises(ShapeError, match="members \\(m,\\) of both kinds"):
        advantage(np.array(scores), np.array(members))
