"""Reconstruction robustness: largest success probability of any attack, given privacy and baseline error.

A mechanism is (eta, gamma)-robust if no attack, even one that knows all other records, reconstructs the unknown record
to within `eta` with probability above `gamma`. Bounds take `log_kappa`, the logarithm of the baseline error at `eta`,
and return `gamma` in [0, 1]. All functions raise a `ConfigError` for an argument out of its range.

The success probability is at most `kappa e^epsilon + delta(epsilon)` for every epsilon, also below 0 ([Hayes2023],
theorem 2; [Dong2022], proposition 2.12); by the Neyman-Pearson lemma some attack reaches the minimum over epsilon, if
`delta` is exact. The equivalence of privacy and robustness is theorem 5 of [Balle2022].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import ndtr, ndtri_exp

from lit_recon.errors import ConfigError


def pure_bound(log_kappa: float, epsilon: float) -> float:
    """`kappa e^epsilon` for epsilon-DP. Source: [Balle2022], corollary 3."""
    _check(log_kappa, epsilon=epsilon)
    return _chance(log_kappa + epsilon)


def tight_pure_bound(log_kappa: float, epsilon: float) -> float:
    """`approximate_bound` for epsilon-DP: the best bound, exact for randomized response."""
    return approximate_bound(log_kappa, epsilon, 0.0)


def approximate_bound(log_kappa: float, epsilon: float, delta: float) -> float:
    """The best bound for (epsilon, delta)-DP: `min(kappa e^epsilon + delta, 1 - e^-epsilon (1 - delta - kappa))`.

    Source: [Hayes2023] with the trade-off function of [Dong2022].
    """
    _check(log_kappa, epsilon=epsilon)
    _check_delta(delta)
    kappa = math.exp(log_kappa)
    return min(_chance(log_kappa + epsilon) + delta, 1 - math.exp(-epsilon) * (1 - delta - kappa), 1.0)


def renyi_bound(log_kappa: float, orders: Sequence[float], epsilons: Sequence[float]) -> float:
    """`(kappa e^epsilon)^((alpha - 1) / alpha)`, minimized over all orders alpha, each above 1 and with its epsilon.

    Source: [Balle2022], theorem 2.
    """
    if not orders or len(orders) != len(epsilons) or min(orders) <= 1:
        raise ConfigError(
            f"a Renyi bound needs one epsilon per order, and orders above 1; got {len(orders)} orders from "
            f"{min(orders, default=None)} on and {len(epsilons)} epsilons"
        )
    _check(log_kappa, epsilon=min(epsilons))
    return min(
        _chance((log_kappa + epsilon) * (alpha - 1) / alpha) for alpha, epsilon in zip(orders, epsilons, strict=True)
    )


def concentrated_bound(log_kappa: float, rho: float) -> float:
    """`exp(-(sqrt(log 1/kappa) - sqrt(rho))^2)` for rho-zCDP, and 1 for `rho >= log 1/kappa`.

    Source: [Balle2022], corollary 4; `gaussian_bound` is smaller where the noise is Gaussian.
    """
    _check(log_kappa, rho=rho)
    if rho >= -log_kappa:
        return 1.0
    return math.exp(-((math.sqrt(-log_kappa) - math.sqrt(rho)) ** 2))


def gaussian_bound(log_kappa: float, mu: float) -> float:
    """`Phi(Phi^-1(kappa) + mu)`: the best bound for Gaussian noise; some attack attains it.

    `mu` is sensitivity over standard deviation of the noise; `sqrt(steps) / noise_multiplier` for full batches.

    Source: [Hayes2023]; [Dong2022], equation 6.
    """
    _check(log_kappa, mu=mu)
    if log_kappa == 0:
        return 1.0
    return float(ndtr(ndtri_exp(log_kappa) + mu))


def laplace_bound(log_kappa: float, epsilon: float) -> float:
    """The best bound for Laplace noise of scale `sensitivity / epsilon` on one number.

    Source: [Hayes2023] with the trade-off function of [Dong2022].
    """
    _check(log_kappa, epsilon=epsilon)
    kappa = math.exp(log_kappa)
    if log_kappa < -epsilon - math.log(2):
        return math.exp(log_kappa + epsilon)
    if kappa <= 0.5:
        return 1 - math.exp(-epsilon - log_kappa) / 4
    return 1 - math.exp(-epsilon) * (1 - kappa)


def _check(log_kappa: float, **strengths: float) -> None:
    if not -math.inf < log_kappa <= 0:
        raise ConfigError(f"log_kappa must be finite and at most 0; got {log_kappa}: kappa is a probability above 0")
    for name, value in strengths.items():
        if not value >= 0:
            raise ConfigError(f"{name} must be at least 0; got {value}")


def _check_equivalence(epsilon: float, delta: float = 0.0) -> None:
    if not 0 <= epsilon < math.inf:
        raise ConfigError(f"epsilon must be at least 0 and finite; got {epsilon}")
    _check_delta(delta)


def _check_delta(delta: float) -> None:
    if not 0 <= delta <= 1:
        raise ConfigError(f"delta must lie in [0, 1]; got {delta}")


def _chance(logarithm: float) -> float:
    return math.exp(min(0.0, logarithm))


def two_point_baseline(epsilon: float) -> float:
    """Baseline error of the priors of theorem 5: two candidates with odds `e^epsilon` to 1."""
    _check_equivalence(epsilon)
    return 1 / (1 + math.exp(-epsilon))


def privacy_from_robustness(epsilon: float, gamma: float) -> float:
    """The delta at `epsilon` of a mechanism for which every two candidates are identified with probability <= `gamma`.

    The candidates have odds `e^epsilon` to 1; `gamma` is at least the probability of the best constant guess. The
    result `(1 + e^epsilon) gamma - e^epsilon`, in [0, 1], is exact if `gamma` is the probability of the best attack.
    """
    least = two_point_baseline(epsilon)
    if not least - 1e-12 <= gamma <= 1:
        raise ConfigError(
            f"gamma must lie between {least:.6g} and 1 for epsilon={epsilon}: guessing the likelier candidate succeeds "
            f"that often; got {gamma}"
        )
    # Uses the probability of failure: a large epsilon does not overflow.
    return max(0.0, gamma - (1 - gamma) * math.exp(epsilon)) if gamma < 1 else 1.0


def robustness_from_privacy(epsilon: float, delta: float) -> float:
    """Inverse of `privacy_from_robustness`: success probability of the best attack, given the exact delta."""
    _check_equivalence(epsilon, delta)
    return (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon))


#: Lower end of the search for the best epsilon.
_LEAST_LOG_RATIO = -50.0
#: Grid to locate the minimum; every epsilon gives a valid bound, so an inexact minimum only loosens it.
_GRID_POINTS = 65


def profile_bound(log_kappa: float, profile: Callable[[float], float]) -> float:
    """The minimum of `kappa e^epsilon + delta(epsilon)` over all real epsilon.

    `profile` is `sup_E P(E) - e^epsilon Q(E)` at any real epsilon, with `P` the distribution of the outputs with the
    record and `Q` that without; any upper bound of it gives a valid gamma.
    """
    _check(log_kappa)

    def chance(epsilon: float) -> float:
        return math.exp(log_kappa + epsilon) + profile(epsilon)

    # The sum is convex in e^epsilon and has one minimum, between flat parts near 1; beyond log 1/kappa it exceeds 1.
    grid = np.linspace(_LEAST_LOG_RATIO, -log_kappa, _GRID_POINTS)
    lowest = int(np.argmin([chance(epsilon) for epsilon in grid]))
    valley = (grid[max(lowest - 1, 0)], grid[min(lowest + 1, _GRID_POINTS - 1)])
    found = minimize_scalar(chance, bounds=valley, method="bounded", options={"xatol": 1e-7})
    return min(1.0, float(found.fun), chance(grid[lowest]))


#: Normal numbers drawn at a time; smallest number of tail samples for which a standard error is computed.
_CHUNK, _LEAST_TAKEN = 1_000_000, 20


class Simulated(NamedTuple):
    """A simulated probability and its standard error."""

    value: float
    standard_error: float


def simulated_bound(
    log_kappa: float,
    noise_multiplier: float,
    steps: int,
    sampling_rate: float = 1.0,
    n_samples: int = 40_000,
    seed: int = 0,
) -> Simulated:
    """The least `kappa e^c + E[(1 - e^(c - L))_+]` over `c`, with `L` the log-likelihood ratio of simulated outputs.

    An estimate of the quantity that `profile_bound` bounds from above, too low by about its squared standard error,
    from `n_samples` trainings. `noise_multiplier` is over the clipping norm, `sampling_rate` the probability of the
    record to be in a step's batch. A probability that is too small for so few samples is a `ConfigError` too.
    """
    _check(log_kappa)
    if noise_multiplier <= 0 or not 0 < sampling_rate <= 1 or min(steps, n_samples - 1) < 1:
        raise ConfigError(
            "a simulation needs noise_multiplier above 0, sampling_rate in (0, 1], steps of at least 1 and n_samples "
            f"of at least 2; got {noise_multiplier}, {sampling_rate}, {steps} and {n_samples}"
        )
    ratios = np.sort(_log_ratios(noise_multiplier, steps, sampling_rate, n_samples, seed))[::-1]
    # Outputs are taken in order of their likelihood ratio until their probability without the record is kappa.
    log_spent = np.logaddexp.accumulate(-ratios) - math.log(n_samples)
    taken = min(int(np.searchsorted(log_spent, log_kappa, side="right")), n_samples - 1)
    if taken < _LEAST_TAKEN:
        raise ConfigError(
            f"the bound is too small for {n_samples} simulated trainings: {taken} of them are in the tail, "
            f"{_LEAST_TAKEN} are needed; raise n_samples or use profile_bound"
        )
    threshold = float(ratios[taken])
    gains = -np.expm1(np.minimum(0.0, threshold - ratios))
    value = math.exp(min(0.0, log_kappa + threshold)) + float(gains.mean())
    return Simulated(min(1.0, value), float(gains.std(ddof=1)) / math.sqrt(n_samples))


def _log_ratios(
    noise_multiplier: float, steps: int, sampling_rate: float, n_samples: int, seed: int
) -> NDArray[np.float64]:
    """`log P(x) / Q(x)` of outputs `x` drawn with the record, `(n_samples,)`."""
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // steps)
    ratios = []
    for start in range(0, n_samples, rows):
        shape = (min(rows, n_samples - start), steps)
        outputs = (rng.random(shape) < sampling_rate) + noise_multiplier * rng.standard_normal(shape)
        exponents = (2 * outputs - 1) / (2 * noise_multiplier**2)
        if sampling_rate < 1:
            exponents = np.logaddexp(math.log1p(-sampling_rate), math.log(sampling_rate) + exponents)
        ratios.append(exponents.sum(1))
    return np.concatenate(ratios)
