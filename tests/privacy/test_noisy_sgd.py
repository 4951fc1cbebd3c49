from __future__ import annotations

import math

import pytest

from lit_recon.errors import ConfigError
from lit_recon.privacy.noisy_sgd import (
    FullBatchSGD,
    Neighbors,
    NoisySGD,
    PoissonSGD,
    PrivateDescent,
    gaussian_epsilon,
    noisy_sgd,
)


@pytest.mark.parametrize(
    ("noise_multiplier", "epsilon"),
    [(37.3063, 1), (4.99889, 10), (0.946699, 100), (0.245818, 1000), (0.0728716, 10_000)],
)
def test_full_batches(noise_multiplier: float, epsilon: float) -> None:
    training = FullBatchSGD(noise_multiplier, steps=100)
    assert training.epsilon(1e-5) == pytest.approx(epsilon, rel=1e-5)
    assert training.delta(epsilon) == pytest.approx(1e-5, rel=1e-2)
    assert training.mu**2 / 2 == pytest.approx(50 / noise_multiplier**2)


def test_replacing_costs_as_much_as_half_the_noise() -> None:
    replaced = FullBatchSGD(10.0, steps=7, neighbors="replace_one")
    assert replaced.epsilon(1e-5) == FullBatchSGD(5.0, steps=7).epsilon(1e-5)
    assert replaced.profile(0.5) == FullBatchSGD(10.0, steps=7).delta(0.5)


@pytest.mark.parametrize("neighbors", ["add_or_remove_one", "replace_one"])
def test_sampling_every_record_is_full_batch_and_never_below(neighbors: Neighbors) -> None:
    sampled, full = PoissonSGD(10.0, 100, neighbors, sampling_rate=1.0), FullBatchSGD(10.0, 100, neighbors)
    assert 0 <= sampled.epsilon(1e-5) / full.epsilon(1e-5) - 1 < 1e-5
    assert 0 <= sampled.delta(1.0) / full.delta(1.0) - 1 < 1e-4
    for epsilon in (-1.0, 0.0, 2.0):
        assert sampled.profile(epsilon) == pytest.approx(full.profile(epsilon), rel=1e-4)


@pytest.mark.parametrize(("noise_multiplier", "steps"), [(10.0, 1), (5.0, 100), (50.0, 10_000)])
def test_rounding_does_not_take_small_probabilities_below_the_exact_ones(noise_multiplier: float, steps: int) -> None:
    sampled, full = PoissonSGD(noise_multiplier, steps), FullBatchSGD(noise_multiplier, steps)
    middle = full.mu**2 / 2
    for sigmas in range(-24, 41):
        epsilon = middle + sigmas / 4 * full.mu
        exact, bound = full.profile(epsilon), sampled.profile(epsilon)
        assert exact <= bound <= min(1.0, exact * 1.001 + 2 * sampled.rounding)
        if epsilon >= 0:
            assert full.delta(epsilon) <= sampled.delta(epsilon)
    for delta in (1e-11, 1e-9):
        assert 0 <= sampled.epsilon(delta) / full.epsilon(delta) - 1 < 0.05


def test_a_delta_below_rounding_errors_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"delta must be at least 1\.05e-12 for 100 steps on sampled .*got 1e-16"):
        PoissonSGD(1.0, 100, sampling_rate=0.01).epsilon(1e-16)
    assert PoissonSGD(1.0, 100, sampling_rate=0.01).epsilon(1.05e-12) < math.inf
    for noise in (None, 1.0):
        descent = PrivateDescent(noise_multiplier=noise, target_epsilon=8.0, delta=1e-16)
        with pytest.raises(ConfigError, match=r"delta must be at least"):
            descent.noise(100, 0.01, 1000.0)
    assert FullBatchSGD(1.0, 100).epsilon(1e-16) < math.inf


@pytest.mark.parametrize(
    ("sampling_rate", "noise_multiplier", "steps", "interval"),
    [(0.1, 1.0, 100, 1e-3), (0.01, 0.6, 300, 1e-3), (0.25, 10.0, 50, 1e-4)],
)
def test_sampled_batches_agree_with_dp_accounting_on_a_fine_grid(
    sampling_rate: float, noise_multiplier: float, steps: int, interval: float
) -> None:
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    reference = from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_rate, value_discretization_interval=interval
    ).self_compose(steps)
    training = PoissonSGD(noise_multiplier, steps, sampling_rate=sampling_rate)
    assert training.epsilon(1e-5) == pytest.approx(reference.get_epsilon_for_delta(1e-5), rel=1e-4)
    assert training.delta(1.0) == pytest.approx(reference.get_delta_for_epsilon(1.0), rel=1e-3)


def test_sampling_and_replacing_act_as_they_should() -> None:
    def spent(training: NoisySGD) -> float:
        return training.epsilon(1e-5)

    sampled = PoissonSGD(1.0, 30, sampling_rate=0.1)
    assert spent(PoissonSGD(1.0, 30, sampling_rate=0.05)) < spent(sampled) < spent(FullBatchSGD(1.0, 30))
    replaced = PoissonSGD(1.0, 30, "replace_one", sampling_rate=0.1)
    assert spent(sampled) < spent(replaced)
    assert replaced.profile(0.3) == sampled.profile(0.3)


def test_a_record_that_is_hardly_ever_used_is_hidden_by_sampling_alone() -> None:
    training = PoissonSGD(0.2, 3, sampling_rate=1e-6)
    assert training.delta(0.0) < 3.1e-6
    assert training.epsilon(1e-5) == 0


def test_the_kind_follows_the_sampling_rate() -> None:
    assert isinstance(noisy_sgd(1.0, 10), FullBatchSGD)
    assert noisy_sgd(1.0, 10, 0.5, "replace_one") == PoissonSGD(1.0, 10, "replace_one", sampling_rate=0.5)


def test_a_direct_formula_for_one_step() -> None:
    # With the record, one draw from a mixture; the densities' difference integrated on a grid.
    training, q, sigma, epsilon = PoissonSGD(0.8, 1, sampling_rate=0.3), 0.3, 0.8, 0.4
    step = 1e-4
    total = 0.0
    for index in range(-80_000, 90_000):
        x = index * step
        without = math.exp(-((x / sigma) ** 2) / 2)
        with_record = (1 - q) * without + q * math.exp(-(((x - 1) / sigma) ** 2) / 2)
        total += max(0.0, with_record - math.exp(epsilon) * without)
    expected = total * step / (sigma * math.sqrt(2 * math.pi))
    assert training.profile(epsilon) == pytest.approx(expected, rel=1e-5)


def test_one_full_step_is_the_gaussian_mechanism() -> None:
    assert noisy_sgd(2.0, 1).epsilon(1e-6) == gaussian_epsilon(0.5, 1e-6)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"noise_multiplier": 0.0, "steps": 1}, "noise_multiplier must be above 0"),
        ({"noise_multiplier": 1.0, "steps": 0}, "steps must be at least 1"),
        ({"noise_multiplier": 1.0, "steps": 1, "sampling_rate": 0.0}, "sampling_rate must be"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        noisy_sgd(**settings)


@pytest.mark.parametrize("training", [FullBatchSGD(1.0, 1), PoissonSGD(1.0, 1, sampling_rate=0.5)])
def test_budgets_out_of_range_are_refused(training: NoisySGD) -> None:
    with pytest.raises(ConfigError, match="epsilon must be at least 0"):
        training.delta(-0.1)
    with pytest.raises(ConfigError, match="delta must lie"):
        training.epsilon(1.0)
