"""DP-SGD as it is configured, and the noise for a given epsilon, from 0.1 to 10,000."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scipy.optimize import brentq

from lit_recon.errors import ConfigError
from lit_recon.privacy.gaussian import gaussian_mu
from lit_recon.privacy.noisy_sgd import Neighbors, PoissonSGD, clip_norms_apart, noisy_sgd

#: Relative accuracy of the root for sampled batches.
_ACCURACY = 1e-4
#: A coarse grid overstates epsilon a little, which gives a little more noise and saves most of the time.
_GRID_POINTS = 4_000
#: Replaces an epsilon of 0, which has no logarithm.
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


@dataclass(frozen=True)
class PrivateDescent:
    """DP-SGD: every step clips the gradient of each record, sums, and adds Gaussian noise.

    Args:
        bound: norm that the gradient of a single record is clipped to, over all parameters; 0 lets no gradient pass,
            infinity does not clip and takes no noise.
        noise_multiplier: standard deviation of the noise on the sum of the clipped gradients, over `bound`; 0 only
            clips. Default: the least noise that keeps `target_epsilon`.
        target_epsilon: privacy budget of the whole training; checked against `noise_multiplier` where both are given.
        delta: probability with which the guarantee may fail.
        neighbors: data sets that must be hard to tell apart: with and without one record, or with one record replaced.

    Raises:
        ConfigError: a number is out of its range, noise without a finite bound, or neither noise nor a budget.

    Source: Abadi et al. 2016, algorithm 1; Balle, Cherubin and Hayes 2022, section VI-D, with a bound of 1 and a delta
    of 1e-5.

    >>> PrivateDescent(target_epsilon=10.0).noise(steps=100)  # doctest: +ELLIPSIS
    4.9988...
    """

    bound: float = 1.0
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    delta: float = 1e-5
    neighbors: Neighbors = "add_or_remove_one"

    def __post_init__(self) -> None:
        noise, target = self.noise_multiplier, self.target_epsilon
        if not self.bound >= 0:
            raise ConfigError(f"dp: the clipping norm must be at least 0, such as 1.0; got {self.bound:g}")
        if noise is None and target is None:
            raise ConfigError("dp needs a noise_multiplier, such as 1.0, or a target_epsilon, such as 8.0; got neither")
        if noise is not None and not 0 <= noise < math.inf:
            raise ConfigError(f"dp.noise_multiplier must be at least 0 and finite, such as 1.0; got {noise:g}")
        if target is not None and not 0 < target < math.inf:
            raise ConfigError(f"dp.target_epsilon must be above 0 and finite, such as 8.0; got {target:g}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"dp.delta must lie strictly between 0 and 1, such as 1e-5; got {self.delta:g}")
        if self.bound == math.inf and (target is not None or noise):
            raise ConfigError(
                "dp: the clipping norm is infinite, but the noise is scaled by it: give a finite norm, such as 1.0, or "
                "set dp.noise_multiplier to 0 and leave dp.target_epsilon out"
            )

    def noise(self, steps: int, sampling_rate: float = 1.0, most: float = math.inf) -> float:
        """The noise multiplier of a training.

        Args:
            steps: number of releases.
            sampling_rate: chance of a record to be in a step's batch; 1 for full batches.
            most: largest noise multiplier to choose.

        Raises:
            ConfigError: the given noise, or `most`, does not keep the budget.
        """
        noise, target = self.noise_multiplier, self.target_epsilon
        if target is None:
            return noise or 0.0
        limit = most if noise is None else noise
        if limit < math.inf:
            smallest = self.with_noise(limit).epsilon(steps, sampling_rate)
            if target < smallest:
                remedy = "take fewer steps" if noise is None else "leave dp.noise_multiplier out to have it chosen"
                raise ConfigError(
                    f"dp.target_epsilon={target:g} cannot be reached in {steps} steps with a noise multiplier of "
                    f"{limit:g}: the smallest possible epsilon is {_rounded_up(smallest)}; raise the target, or {remedy}"
                )
        if noise is not None:
            return noise
        return calibrate_noise(target, self.delta, steps, sampling_rate, self.neighbors)

    def with_noise(self, noise_multiplier: float) -> PrivateDescent:
        """The same with a given noise in place of a budget."""
        return replace(self, noise_multiplier=noise_multiplier, target_epsilon=None)

    def epsilon(self, steps: int, sampling_rate: float = 1.0) -> float:
        """Epsilon after so many steps at `delta`; infinite without noise, 0 before the first step."""
        if steps == 0:
            return 0.0
        noise = self.noise(steps, sampling_rate)
        return noisy_sgd(noise, steps, sampling_rate, self.neighbors).epsilon(self.delta) if noise else math.inf


def _rounded_up(value: float) -> str:
    """At least the value, to three digits.

    >>> _rounded_up(1.23401)
    '1.24'
    """
    if not 0 < value < math.inf:
        return f"{value:g}"
    unit = 10 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit) * unit:.3g}"
