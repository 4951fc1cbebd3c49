from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import laplace, norm

from lit_recon.bounds.baseline_error import gaussian_prior, uniform_ball
from lit_recon.bounds.robustness import (
    approximate_bound,
    concentrated_bound,
    gaussian_bound,
    laplace_bound,
    pure_bound,
    renyi_bound,
    tight_pure_bound,
)
from lit_recon.errors import ConfigError

KAPPAS = [0.9, 0.6, 0.5, 0.3, 0.1, 1e-3, 1e-10]


@pytest.mark.parametrize(
    ("kappa", "alpha", "epsilon", "gamma"),
    [
        (0.01, 2, 1, 0.16487212707),
        (0.1, 2, 0.5, 0.406044489028),
        (1e-3, 10, 3, 0.0296889679675),
        (1e-6, 32, 5, 1.95485206197e-4),
    ],
)
def test_theorem_2(kappa: float, alpha: float, epsilon: float, gamma: float) -> None:
    assert renyi_bound(math.log(kappa), [alpha], [epsilon]) == pytest.approx(gamma, rel=1e-9, abs=1e-9)
    assert renyi_bound(math.log(kappa), [1.01, alpha], [99.0, epsilon]) == pytest.approx(gamma, rel=1e-9)


@pytest.mark.parametrize(
    ("kappa", "epsilon", "gamma"),
    [(0.1, 1, 0.271828182846), (0.01, 2, 0.0738905609893), (1e-3, 5, 0.148413159103), (1e-6, 10, 0.0220264657948)],
)
def test_corollary_3(kappa: float, epsilon: float, gamma: float) -> None:
    assert pure_bound(math.log(kappa), epsilon) == pytest.approx(gamma, abs=1e-12)


@pytest.mark.parametrize(
    ("kappa", "rho", "gamma", "exact"),
    [
        (0.1, 0.5, 0.5186017317, 0.3891436916),
        (0.1, 0.1, 0.2362464095, 0.2020452805),
        (0.01, 0.5, 0.1261459225, 0.0923622481),
        (0.01, 1, 0.2689477561, 0.1808490090),
        (1e-3, 2, 0.2290280254, 0.1378054129),
        (1e-6, 2, 0.0049792947, 0.0029487703),
    ],
)
def test_corollary_4_and_the_exact_bound_below_it(kappa: float, rho: float, gamma: float, exact: float) -> None:
    assert concentrated_bound(math.log(kappa), rho) == pytest.approx(gamma, abs=1e-9)
    assert gaussian_bound(math.log(kappa), math.sqrt(2 * rho)) == pytest.approx(exact, abs=1e-9)


def test_corollary_4_says_nothing_from_log_1_over_kappa_on() -> None:
    assert concentrated_bound(math.log(0.1), 2.4) == 1
    assert concentrated_bound(0.0, 0.0) == 1


@pytest.mark.parametrize(("kappa", "rho"), [(0.1, 0.5), (1e-3, 2.0), (1e-30, 20.0)])
def test_corollary_4_is_theorem_2_at_its_best_order(kappa: float, rho: float) -> None:
    log_kappa = math.log(kappa)

    def bound(alpha: float) -> float:
        return math.log(renyi_bound(log_kappa, [alpha], [alpha * rho]))

    # Between the orders at which the bound is 1.
    found = minimize_scalar(bound, bounds=(1, -log_kappa / rho), method="bounded", options={"xatol": 1e-10})
    assert concentrated_bound(log_kappa, rho) == pytest.approx(math.exp(found.fun), rel=1e-9)
    assert found.x == pytest.approx(math.sqrt(-log_kappa / rho), rel=1e-4)


@pytest.mark.parametrize(
    ("mu", "gammas"),
    [
        (0.26805, (0.1554, 2.385e-3, 5.53e-10, 2.13e-29)),
        (2.00045, (0.7639, 0.1379, 6.48e-6, 1.49e-21)),
        (10.563, (1, 1, 0.99999, 0.1838)),
    ],
)
def test_gaussian_values(mu: float, gammas: tuple[float, ...]) -> None:
    kappas = (0.1, 1e-3, 1e-10, 1e-30)
    assert [gaussian_bound(math.log(kappa), mu) for kappa in kappas] == pytest.approx(gammas, rel=2e-3)


@pytest.mark.parametrize("log_kappa", [math.log(0.1), math.log(1e-10), math.log(1e-300)])
@pytest.mark.parametrize("mu", [0.0, 0.3, 5.0, 40.0])
def test_the_gaussian_bound_agrees_with_scipy(log_kappa: float, mu: float) -> None:
    expected = norm.sf(norm.isf(math.exp(log_kappa)) - mu)
    assert gaussian_bound(log_kappa, mu) == pytest.approx(expected, rel=1e-9)


def test_kappa_may_be_below_the_least_float() -> None:
    # With kappa rounded to 0 the bound would be 0, and wrong.
    log_kappa = uniform_ball(0.5, 3072).log_kappa
    assert gaussian_bound(log_kappa, 137.0) == pytest.approx(1.0)
    assert 0.01 < gaussian_bound(log_kappa, 65.0) < 0.99
    assert pure_bound(log_kappa, 2128.0) == pytest.approx(math.exp(2128 + log_kappa))


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize("epsilon", [0.0, 0.2, 1.0, 4.0])
def test_laplace_noise_is_bounded_by_its_own_tails(kappa: float, epsilon: float) -> None:
    # The best test for a shift of Laplace noise is a threshold.
    expected = laplace.sf(laplace.isf(kappa) - epsilon)
    assert laplace_bound(math.log(kappa), epsilon) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_randomized_response_meets_the_pure_bound(kappa: float, epsilon: float) -> None:
    # Report the truth with chance p; say "yes" always upon "yes", and upon "no" as often as kappa still allows.
    p = 1 / (1 + math.exp(-epsilon))
    found = kappa / (1 - p) * p if kappa <= 1 - p else p + (kappa - (1 - p)) / p * (1 - p)
    assert tight_pure_bound(math.log(kappa), epsilon) == pytest.approx(found, rel=1e-12)


def test_a_delta_is_added() -> None:
    assert approximate_bound(math.log(0.1), 1.0, 0.05) == pytest.approx(0.1 * math.e + 0.05)
    assert approximate_bound(math.log(0.1), 1.0, 1.0) == 1


@pytest.mark.parametrize(
    "bound", [pure_bound, tight_pure_bound, concentrated_bound, gaussian_bound, laplace_bound], ids=lambda b: b.__name__
)
def test_bounds_grow_with_kappa_and_with_epsilon(bound: Callable[[float, float], float]) -> None:
    strengths = np.linspace(0, 12, 25)
    grid = np.array([[bound(math.log(kappa), strength) for strength in strengths] for kappa in sorted(KAPPAS)])
    assert (np.diff(grid, axis=0) >= -1e-15).all()
    assert (np.diff(grid, axis=1) >= -1e-15).all()
    assert grid.min() >= 0
    assert grid.max() <= 1
    assert grid[:, 0] == pytest.approx(sorted(KAPPAS), rel=1e-12)


@pytest.mark.parametrize("dimension", [100, 784, 3072])
def test_propositions_6_and_7(dimension: int) -> None:
    # A budget that grows as the root of the dimension leaves a chance that falls exponentially with it.
    budget = math.sqrt(dimension)
    for baseline in (uniform_ball(0.5, dimension), gaussian_prior(math.sqrt(dimension) / 2, 1.0, dimension)):
        for gamma in (pure_bound(baseline.log_kappa, budget), concentrated_bound(baseline.log_kappa, budget)):
            assert gamma < math.exp(-0.07 * dimension)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: pure_bound(0.1, 1.0), "log_kappa must be"),
        (lambda: gaussian_bound(-math.inf, 1.0), "log_kappa must be"),
        (lambda: gaussian_bound(-1.0, -1.0), "mu must be at least 0"),
        (lambda: concentrated_bound(-1.0, math.nan), "rho must be"),
        (lambda: approximate_bound(-1.0, 1.0, 2.0), "delta must lie"),
        (lambda: renyi_bound(-1.0, [1.0], [1.0]), "orders above 1"),
        (lambda: renyi_bound(-1.0, [2.0], []), "one epsilon per order"),
        (lambda: renyi_bound(-1.0, [], []), "None on"),
    ],
)
def test_values_out_of_range_are_refused(call: Callable[[], float], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        call()


def test_no_prior_knowledge_is_needed_where_all_guesses_are_right() -> None:
    assert gaussian_bound(0.0, 1.0) == pure_bound(0.0, 0.0) == 1
