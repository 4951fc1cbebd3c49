from __future__ import annotations

import math

import pytest
from scipy.stats import laplace

from lit_recon.bounds.robustness import gaussian_bound, laplace_bound, profile_bound, tight_pure_bound
from lit_recon.errors import ConfigError
from lit_recon.privacy import FullBatchSGD, PoissonSGD, gaussian_delta

KAPPAS = [0.8, 0.5, 0.1, 1e-3, 1e-8]


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize("mu", [0.1, 1.0, 6.0])
def test_the_profile_of_gaussian_noise_gives_its_bound(kappa: float, mu: float) -> None:
    found = profile_bound(math.log(kappa), lambda epsilon: gaussian_delta(mu, epsilon))
    assert found == pytest.approx(gaussian_bound(math.log(kappa), mu), rel=1e-9)


@pytest.mark.parametrize(("log_kappa", "mu"), [(-2129.0, 65.0), (-500.0, 30.0), (-78.9, 0.5)])
def test_a_kappa_below_the_least_float_finds_its_valley(log_kappa: float, mu: float) -> None:
    found = profile_bound(log_kappa, lambda epsilon: gaussian_delta(mu, epsilon))
    assert found == pytest.approx(gaussian_bound(log_kappa, mu), rel=1e-6)


@pytest.mark.parametrize("kappa", KAPPAS)
def test_the_profile_of_laplace_noise_gives_its_bound(kappa: float) -> None:
    def profile(epsilon: float) -> float:
        # Outputs are likelier by e^epsilon above a threshold, for epsilons that the noise reaches.
        if not -2.0 <= epsilon < 2.0:
            return max(0.0, 1 - math.exp(epsilon))
        threshold = (epsilon + 2.0) / 2
        return float(laplace.sf(threshold - 2.0) - math.exp(epsilon) * laplace.sf(threshold))

    assert profile_bound(math.log(kappa), profile) == pytest.approx(laplace_bound(math.log(kappa), 2.0), rel=1e-5)


@pytest.mark.parametrize("kappa", KAPPAS)
def test_the_profile_of_randomized_response_gives_its_bound(kappa: float) -> None:
    truth = 1 / (1 + math.exp(-1.5))

    def profile(epsilon: float) -> float:
        return max(0.0, truth - math.exp(epsilon) * (1 - truth)) + max(0.0, (1 - truth) - math.exp(epsilon) * truth)

    assert profile_bound(math.log(kappa), profile) == pytest.approx(tight_pure_bound(math.log(kappa), 1.5), rel=1e-5)


def test_sampling_every_record_is_the_closed_form() -> None:
    sampled, full = PoissonSGD(10.0, steps=100, sampling_rate=1.0), FullBatchSGD(10.0, steps=100)
    for kappa in (0.7, 0.1, 1e-3):
        exact = gaussian_bound(math.log(kappa), full.mu)
        assert exact <= profile_bound(math.log(kappa), sampled.profile) < exact * (1 + 1e-5)
        assert profile_bound(math.log(kappa), full.profile) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("log_kappa", [0.1, -math.inf, math.nan])
def test_kappa_is_a_probability(log_kappa: float) -> None:
    with pytest.raises(ConfigError, match="log_kappa must be"):
        profile_bound(log_kappa, lambda epsilon: 1.0)
