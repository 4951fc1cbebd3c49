from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad

from lit_recon.bounds import profile_bound, renyi_bound
from lit_recon.errors import ConfigError
from lit_recon.privacy.gaussian import ORDERS, renyi_curve
from lit_recon.privacy.noisy_sgd import FullBatchSGD, PoissonSGD


def test_full_batches_are_alpha_rho() -> None:
    rho = FullBatchSGD(3.0, steps=20).mu ** 2 / 2
    assert renyi_curve(3.0, steps=20) == pytest.approx([order * rho for order in ORDERS])


@pytest.mark.parametrize("order", [1.5, 2.0, 8.0])
def test_one_sampled_step_is_the_integral(order: float) -> None:
    q, sigma = 0.2, 1.3

    def integrand(x: float) -> float:
        ratio = 1 - q + q * math.exp((2 * x - 1) / (2 * sigma**2))
        return ratio**order * math.exp(-((x / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))

    expected = math.log(quad(integrand, -20, 40, limit=200)[0]) / (order - 1)
    assert renyi_curve(sigma, 1, q, [order]) == pytest.approx([expected], rel=1e-6)


def test_theorem_2_with_the_curve_is_above_the_best_bound() -> None:
    orders = [float(order) for order in np.arange(2, 20)]
    curve = renyi_curve(1.0, steps=50, sampling_rate=0.1, orders=orders)
    training = PoissonSGD(1.0, 50, sampling_rate=0.1)
    for kappa in (0.1, 1e-3):
        best = profile_bound(math.log(kappa), training.profile)
        assert best < renyi_bound(math.log(kappa), orders, curve) < 5 * best


@pytest.mark.parametrize(
    ("noise", "steps", "rate", "order"),
    [(0.0, 1, 1.0, 2.0), (1.0, 0, 1.0, 2.0), (1.0, 1, 2.0, 2.0), (1.0, 1, 1.0, 1.0)],
)
def test_values_out_of_range_are_refused(noise: float, steps: int, rate: float, order: float) -> None:
    with pytest.raises(ConfigError, match="orders above 1"):
        renyi_curve(noise, steps, rate, [order])
    with pytest.raises(ConfigError, match="orders above 1"):
        renyi_curve(1.0, 1, orders=[])
