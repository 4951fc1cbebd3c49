from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from mpmath import exp, log, mp, mpf, ncdf

from lit_recon.errors import ConfigError
from lit_recon.privacy.noisy_sgd import gaussian_delta, gaussian_epsilon, gaussian_log_delta, gaussian_mu


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1, 3, 10, 150])
@pytest.mark.parametrize("epsilon", [-300, -5, -0.1, 0, 0.1, 1, 10, 100])
def test_delta_is_the_analytic_formula(mu: float, epsilon: float) -> None:
    with mp.workdps(60):
        m, e = mpf(mu), mpf(epsilon)
        value = ncdf(m / 2 - e / m) - exp(e) * ncdf(-m / 2 - e / m)
        expected = float(log(value))
    assert gaussian_log_delta(mu, epsilon) == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize(
    ("mu", "epsilon", "delta"),
    [(1, 1, 0.1269367375), (1, 0.5, 0.2384217081), (0.5, 2, 9.4392e-6), (2, 3, 0.1838130765)],
)
def test_delta_values(mu: float, epsilon: float, delta: float) -> None:
    assert gaussian_delta(mu, epsilon) == pytest.approx(delta, abs=1e-9)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 100.0, 10_000.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_mu_and_epsilon_are_inverse(epsilon: float, delta: float) -> None:
    assert gaussian_epsilon(gaussian_mu(epsilon, delta), delta) == pytest.approx(epsilon, rel=1e-9)


def test_agreement_with_dp_accounting() -> None:
    from dp_accounting import get_epsilon_gaussian

    for mu in (0.1, 1.0, 7.0, 40.0):
        assert gaussian_epsilon(mu, 1e-5) == pytest.approx(get_epsilon_gaussian(1 / mu, 1e-5), rel=1e-8)


def test_a_delta_above_the_distance_of_the_laws_needs_no_epsilon() -> None:
    assert gaussian_epsilon(0.1, 0.5) == 0
    assert gaussian_epsilon(gaussian_mu(0.0, 1e-3), 1e-3) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: gaussian_delta(0.0, 1.0), "mu must be above 0"),
        (lambda: gaussian_epsilon(math.inf, 0.1), "mu must be above 0"),
        (lambda: gaussian_epsilon(1.0, 0.0), "delta must lie"),
        (lambda: gaussian_mu(-1.0, 0.1), "epsilon must be"),
        (lambda: gaussian_mu(1.0, 1.0), "delta must lie"),
    ],
)
def test_values_out_of_range_are_refused(call: Callable[[], float], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        call()
