from __future__ import annotations

import pytest

from lit_recon.errors import ConfigError
from lit_recon.privacy.noisy_sgd import Neighbors, PoissonSGD, calibrate_noise


@pytest.mark.parametrize(
    ("epsilon", "noise_multiplier"),
    [(0.1, 307.4957), (1, 37.3063), (10, 4.99889), (100, 0.946699), (1000, 0.245818), (10_000, 0.0728716)],
)
def test_full_batches_at_any_epsilon(epsilon: float, noise_multiplier: float) -> None:
    assert calibrate_noise(epsilon, 1e-5, steps=100) == pytest.approx(noise_multiplier, rel=2e-6)


def test_replacing_needs_twice_the_noise() -> None:
    twice = calibrate_noise(3.0, 1e-6, steps=5, neighbors="replace_one")
    assert twice == pytest.approx(2 * calibrate_noise(3.0, 1e-6, steps=5))


@pytest.mark.parametrize(
    ("epsilon", "neighbors"), [(1.0, "add_or_remove_one"), (8.0, "replace_one"), (10_000.0, "add_or_remove_one")]
)
def test_sampled_batches_get_what_they_need_and_little_more(epsilon: float, neighbors: Neighbors) -> None:
    noise_multiplier = calibrate_noise(epsilon, 1e-5, steps=100, sampling_rate=0.1, neighbors=neighbors)

    def spent(scale: float) -> float:
        return PoissonSGD(noise_multiplier * scale, 100, neighbors, sampling_rate=0.1).epsilon(1e-5)

    assert spent(1.0) <= epsilon < spent(1 - 1e-3)


@pytest.mark.parametrize("neighbors", ["add_or_remove_one", "replace_one"])
def test_batches_of_nearly_all_records_get_the_noise_of_full_ones(neighbors: Neighbors) -> None:
    full = calibrate_noise(1.0, 1e-5, steps=2, neighbors=neighbors)
    assert calibrate_noise(1.0, 1e-5, steps=2, sampling_rate=1 - 1e-9, neighbors=neighbors) == full
    assert calibrate_noise(1.0, 1e-5, steps=2, sampling_rate=0.9999, neighbors=neighbors) == pytest.approx(
        full, rel=1e-3
    )


def test_a_guarantee_that_needs_no_noise_is_refused() -> None:
    with pytest.raises(ConfigError, match="no noise is needed"):
        calibrate_noise(1.0, 1e-3, steps=10, sampling_rate=1e-5)


@pytest.mark.parametrize(("epsilon", "steps", "sampling_rate"), [(0.0, 1, 1.0), (1.0, 0, 1.0), (1.0, 1, 1.5)])
def test_values_out_of_range_are_refused(epsilon: float, steps: int, sampling_rate: float) -> None:
    with pytest.raises(ConfigError):
        calibrate_noise(epsilon, 1e-5, steps, sampling_rate)
