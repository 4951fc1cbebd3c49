"""The best bound for DP-SGD with Poisson-sampled batches, by simulation: a check of privacy-loss distributions.

Source: Hayes, Mahloujifar and Balle 2023, Bounding training data reconstruction in DP-SGD, corollary 3. They draw
outputs without the record; drawing those with it spreads five to ten times less and reaches any small kappa.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_recon.errors import ConfigError

#: Normal numbers drawn at a time.
_CHUNK = 1_000_000
#: Samples in the tail for its size to be worth a standard error.
_LEAST_TAKEN = 20


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

    An estimate of the quantity that `profile_bound` bounds from above, too low by about its squared standard error.

    Args:
        log_kappa: of the baseline error.
        noise_multiplier: standard deviation of the noise over the clipping norm, above 0.
        steps: number of releases.
        sampling_rate: probability of the record to be in a step's batch, in (0, 1].
        n_samples: simulated trainings.
        seed: of the simulation.

    Raises:
        ConfigError: an argument is out of its range, or the probability is too small for so few samples.
    """
    if not -math.inf < log_kappa <= 0:
        raise ConfigError(f"log_kappa must be finite and at most 0; got {log_kappa}: kappa is a probability above 0")
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
            f"the bound is below what {n_samples} simulated trainings can show: {taken} of them are telling, "
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
