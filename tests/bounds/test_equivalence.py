from __future__ import annotations

import math

import pytest
from scipy.stats import norm

from lit_recon.bounds.robustness import privacy_from_robustness, robustness_from_privacy, two_point_baseline
from lit_recon.errors import ConfigError


@pytest.mark.parametrize(
    ("epsilon", "gamma", "delta"),
    [(1, 0.75, 0.0704295429), (1, 0.8, 0.2563436343), (0, 0.6, 0.2), (2, 0.9, 0.1610943904)],
)
def test_theorem_5(epsilon: float, gamma: float, delta: float) -> None:
    assert privacy_from_robustness(epsilon, gamma) == pytest.approx(delta, abs=1e-9)
    assert robustness_from_privacy(epsilon, delta) == pytest.approx(gamma, abs=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0, 40.0, 1000.0])
def test_randomized_response_has_no_delta(epsilon: float) -> None:
    truth = 1 / (1 + math.exp(-epsilon))
    assert two_point_baseline(epsilon) == truth
    assert privacy_from_robustness(epsilon, truth) == pytest.approx(0, abs=1e-12) if truth < 1 else truth == 1


@pytest.mark.parametrize(
    ("mu", "epsilon", "gamma", "delta"),
    [
        (1, 1, 0.7651971252, 0.1269367375),
        (1, 0.5, 0.7124732223, 0.2384217081),
        (0.5, 2, 0.8807982032, 9.4392e-6),
        (2, 3, 0.9612916225, 0.1838130765),
    ],
)
def test_the_best_attack_on_gaussian_noise_gives_its_delta(
    mu: float, epsilon: float, gamma: float, delta: float
) -> None:
    # Naming the likelier of two candidates with odds e^epsilon to 1, from one draw of noise.
    p, threshold = 1 / (1 + math.exp(epsilon)), mu / 2 + epsilon / mu
    best = p * norm.sf(threshold - mu) + (1 - p) * norm.cdf(threshold)
    assert best == pytest.approx(gamma, abs=1e-9)
    assert privacy_from_robustness(epsilon, best) == pytest.approx(delta, abs=1e-9)


def test_no_attack_is_worse_than_the_constant_guess() -> None:
    with pytest.raises(ConfigError, match="succeeds that often"):
        privacy_from_robustness(1.0, 0.7)
    with pytest.raises(ConfigError, match="epsilon must be"):
        privacy_from_robustness(-1.0, 0.7)
    with pytest.raises(ConfigError, match="delta must lie"):
        robustness_from_privacy(1.0, 1.5)
