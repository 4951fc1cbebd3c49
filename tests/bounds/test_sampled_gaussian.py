from __future__ import annotations

import math

import pytest

from lit_recon.bounds.robustness import gaussian_bound, profile_bound, simulated_bound
from lit_recon.errors import ConfigError
from lit_recon.privacy import PoissonSGD


@pytest.mark.parametrize("kappa", [0.9, 0.1, 1e-3])
@pytest.mark.parametrize("noise_multiplier", [10.0, 1.5])
def test_simulation_agrees_with_the_closed_form_at_full_batch(kappa: float, noise_multiplier: float) -> None:
    found = simulated_bound(math.log(kappa), noise_multiplier, steps=100, n_samples=20_000)
    exact = gaussian_bound(math.log(kappa), 10 / noise_multiplier)
    assert abs(found.value - exact) < 4 * found.standard_error


def test_kappa_may_be_far_below_what_was_simulated() -> None:
    found = simulated_bound(math.log(1e-30), 1.0, steps=100, n_samples=20_000)
    assert abs(found.value - gaussian_bound(math.log(1e-30), 10.0)) < 4 * found.standard_error


def test_a_chance_that_the_samples_do_not_show_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise n_samples"):
        simulated_bound(math.log(1e-12), 10.0, steps=100, n_samples=20_000)


@pytest.mark.parametrize(
    ("sampling_rate", "noise_multiplier", "steps", "kappa", "published"),
    [
        (0.1, 1.0, 100, 0.1, (0.4712, 0.0017)),
        (0.1, 1.0, 100, 0.01, (0.1462, 0.0002)),
        (0.01, 0.6, 300, 0.1, None),
        (0.3, 2.0, 30, 0.7, None),
    ],
)
def test_simulation_agrees_with_privacy_loss_distributions(
    sampling_rate: float, noise_multiplier: float, steps: int, kappa: float, published: tuple[float, float] | None
) -> None:
    found = simulated_bound(math.log(kappa), noise_multiplier, steps, sampling_rate, n_samples=20_000)
    training = PoissonSGD(noise_multiplier, steps, sampling_rate=sampling_rate)
    bound = profile_bound(math.log(kappa), training.profile)
    assert abs(found.value - bound) < 4 * found.standard_error
    assert found.standard_error < 0.01
    if published:
        assert abs(bound - published[0]) < 4 * published[1]


def test_the_standard_error_is_the_spread_over_seeds() -> None:
    found = [simulated_bound(math.log(0.05), 1.0, 20, 0.2, n_samples=2_000, seed=seed) for seed in range(40)]
    mean = sum(value for value, _ in found) / 40
    spread = math.sqrt(sum((value - mean) ** 2 for value, _ in found) / 39)
    assert 0.6 < spread / found[0].standard_error < 1.6


def test_a_simulation_is_repeatable() -> None:
    assert simulated_bound(-2.0, 1.0, 5, n_samples=100, seed=3) == simulated_bound(-2.0, 1.0, 5, n_samples=100, seed=3)
    assert simulated_bound(-2.0, 1.0, 5, n_samples=100, seed=3) != simulated_bound(-2.0, 1.0, 5, n_samples=100, seed=4)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="log_kappa"):
        simulated_bound(1.0, 1.0, 1)
    with pytest.raises(ConfigError, match="a simulation needs"):
        simulated_bound(-1.0, 1.0, 1, sampling_rate=0.0)
