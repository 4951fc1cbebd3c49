"""The noise that a privacy budget asks for, from epsilon 0.1 to 10,000."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.optimize import brentq

from lit_recon.errors import ConfigError
from lit_recon.privacy.gaussian import gaussian_mu
from lit_recon.privacy.neighbors import Neighbors, clip_norms_apart
from lit_recon.privacy.noisy_sgd import PoissonSGD

#: Relative accuracy of a noise multiplier for sampled batches.
_ACCURACY = 1e-4
_COARSE_GRID, _FINE_GRID = 1_000, 20_000
#: Stands for an epsilon of 0, whose logarithm is wanted.
_NOTHING = 1e-6


def calibrate_noise(
    epsilon: float,
    delta: float,
    steps: int,
    sampling_rate: float = 1.0,
    neighbors: Neighbors = "add_or_remove_one",
) -> float:
    """The least noise multiplier that keeps (epsilon, delta): exact for full batches, else at most 1e-4 above the least.

    Full batches take milliseconds at any epsilon; sampled ones take seconds, as every trial composes a distribution.

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

    # Sampling only helps, so the noise for full batches is enough; a coarse grid errs on the same side.
    target = _Target(epsilon, delta, steps, sampling_rate, neighbors)
    coarse = target.log_noise(_COARSE_GRID, math.log(full_batch), width=math.log(2), accuracy=1e-3)
    fine = target.log_noise(_FINE_GRID, coarse + 1e-3, width=0.02, accuracy=_ACCURACY / 2)
    return math.exp(fine + _ACCURACY / 2)


@dataclass(frozen=True)
class _Target:
    """The guarantee that sampled training is to meet."""

    epsilon: float
    delta: float
    steps: int
    sampling_rate: float
    neighbors: Neighbors

    def excess(self, log_noise: float, grid_points: int) -> float:
        """Logarithm of the epsilon that is spent over the one that is allowed."""
        training = PoissonSGD(math.exp(log_noise), self.steps, self.neighbors, self.sampling_rate, grid_points)
        return math.log(max(training.epsilon(self.delta), _NOTHING) / self.epsilon)

    def log_noise(self, grid_points: int, enough: float, width: float, accuracy: float) -> float:
        """Where the excess is 0, sought below `enough` in strides of `width`."""
        low = enough - width
        while self.excess(low, grid_points) < 0:
            enough, low = low, low - width
        return float(brentq(self.excess, low, enough, args=(grid_points,), xtol=accuracy))
