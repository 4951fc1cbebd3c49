"""The noise that a privacy budget asks for, from epsilon 0.1 to 10,000."""

from __future__ import annotations

import math

from scipy.optimize import brentq

from lit_recon.errors import ConfigError
from lit_recon.privacy.gaussian import gaussian_mu
from lit_recon.privacy.noisy_sgd import Neighbors, PoissonSGD, clip_norms_apart

#: Relative accuracy of the root for sampled batches.
_ACCURACY = 1e-4
#: A coarse grid overstates epsilon a little, which asks for a little more noise and saves most of the time.
_GRID_POINTS = 4_000
#: Stands for an epsilon of 0, whose logarithm is wanted.
_NOTHING = 1e-6


def calibrate_noise(
    epsilon: float,
    delta: float,
    steps: int,
    sampling_rate: float = 1.0,
    neighbors: Neighbors = "add_or_remove_one",
) -> float:
    """The least noise multiplier that keeps (epsilon, delta), exact for full batches.

    For sampled ones it is safe, as `PoissonSGD` is, and above the least by less than 1e-3 of itself. Full batches take
    milliseconds at any epsilon; sampled ones take seconds, as every trial composes distributions.

    Args:
        epsilon: above 0.
        delta: strictly between 0 and 1.
        steps: number of releases.
        sampling_rate: chance of a record to enter a step's batch; 1 for full batches.
        neighbors: the relation of the guarantee.

    Raises:
        ConfigError: if an argument is out of its range, or delta exceeds a record's chance of being used at all, so
            that no noise is needed.

    >>> round(calibrate_noise(epsilon=1000.0, delta=1e-5, steps=100), 6)
    0.245818
    """
    if not epsilon > 0 or steps < 1:
        raise ConfigError(
            f"calibration needs epsilon above 0 and at least 1 step; got epsilon={epsilon}, steps={steps}"
        )
    full_batch = clip_norms_apart(neighbors) * math.sqrt(steps) / gaussian_mu(epsilon, delta)
    if sampling_rate == 1:
        return full_batch
    used = -math.expm1(steps * math.log1p(-sampling_rate)) if 0 < sampling_rate < 1 else 1.0
    if used <= delta:
        raise ConfigError(
            f"a record is used with chance {used:.3g}, at most delta={delta:g}: no noise is needed for this guarantee, "
            "which therefore says nothing; choose delta well below 1 / number of records"
        )

    def excess(log_noise: float) -> float:
        """Logarithm of the epsilon that is spent over the one that is allowed."""
        training = PoissonSGD(math.exp(log_noise), steps, neighbors, sampling_rate, _GRID_POINTS)
        return math.log(max(training.epsilon(delta), _NOTHING) / epsilon)

    # Sampling only helps, so the noise for full batches is enough.
    enough = math.log(full_batch)
    low = enough - math.log(2)
    while excess(low) < 0:
        enough, low = low, low - math.log(2)
    return math.exp(float(brentq(excess, low, enough, xtol=_ACCURACY / 4)) + _ACCURACY / 2)
