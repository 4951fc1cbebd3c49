"""Differential privacy of DP-SGD and of the Gaussian mechanism: epsilon and delta of given noise, and the reverse.

Neighbors `add_or_remove_one`: one data set has a record that the other lacks; sums of vectors clipped to norm `C`
differ by at most `C`. `replace_one`, the relation of Balle et al. 2022: both have `n` records, one of them different;
the sums differ by at most `2 C`, so that twice the noise is needed for the same epsilon.

Functions of `mu`, sensitivity over standard deviation of the noise, are exact, and in log space to allow any epsilon;
`T` adaptive releases with `mu` each compose to `sqrt(T) mu`. Arguments out of their range raise a `ConfigError`: `mu`
must be above 0, `delta` strictly between 0 and 1.

Sources: Doroshenko et al. 2022, Connect the dots: tighter discrete approximations of privacy loss distributions
(Opacus' PRV accountant does not terminate below a noise multiplier of about 0.3); [Dong2022], corollary 2.13; Balle
and Wang 2018, Improving the Gaussian mechanism for differential privacy, theorem 8.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr

from lit_recon.errors import ConfigError

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf

#: Absolute and relative accuracy of the roots.
_ROOT_ACCURACY = 1e-13
#: Below this Mills' ratio overflows, and the first of two terms is 1 in double precision.
_OVERFLOW = -30.0


def log_of_delta(delta: float) -> float:
    """The logarithm of a delta strictly between 0 and 1."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta must lie strictly between 0 and 1; got {delta}")
    return math.log(delta)


def gaussian_log_delta(mu: float, epsilon: float) -> float:
    """Logarithm of the smallest delta at an epsilon: `log(Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu))`.

    The two terms are `phi(low) R(low)` and `phi(low) R(high)` with Mills' ratio `R`, which does not overflow. `epsilon`
    is any real number.
    """
    if not 0 < mu < math.inf:
        raise ConfigError(f"mu must be above 0 and finite; got {mu}: it is sensitivity over standard deviation")
    low, high = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    if low > _OVERFLOW:
        ratio = float(erfcx(high / math.sqrt(2)) / erfcx(low / math.sqrt(2)))
    else:
        ratio = math.exp(epsilon + float(log_ndtr(-high)))
    return float(log_ndtr(-low)) + (math.log1p(-ratio) if ratio < 1 else -math.inf)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The smallest delta at an epsilon; see `gaussian_log_delta`."""
    return math.exp(gaussian_log_delta(mu, epsilon))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least epsilon, at least 0, at a delta.

    >>> round(gaussian_epsilon(mu=2.00045, delta=1e-5), 3)
    10.0
    """
    goal = log_of_delta(delta)
    if gaussian_log_delta(mu, 0.0) <= goal:
        return 0.0
    rho = mu**2 / 2
    ceiling = rho + 2 * math.sqrt(rho * -goal)
    return float(brentq(lambda epsilon: gaussian_log_delta(mu, epsilon) - goal, 0.0, ceiling, rtol=_ROOT_ACCURACY))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest `mu`, that is the least noise, that keeps (epsilon, delta), with an epsilon of at least 0."""
    goal = log_of_delta(delta)
    if not 0 <= epsilon < math.inf:
        raise ConfigError(f"epsilon must be at least 0 and finite; got {epsilon}")
    # The mu allowed by zero-concentrated privacy is a lower bound.
    floor = max(math.sqrt(2) * (math.sqrt(epsilon - goal) - math.sqrt(-goal)), delta)
    ceiling = floor
    while gaussian_log_delta(ceiling, epsilon) < goal:
        ceiling *= 2
    return float(
        brentq(lambda mu: gaussian_log_delta(mu, epsilon) - goal, floor, ceiling, rtol=_ROOT_ACCURACY, xtol=1e-300)
    )


Neighbors = Literal["add_or_remove_one", "replace_one"]
#: Added to probabilities of sampled batches, with a rounding error per step, whose product a Fourier transform takes.
#: Measured against full batches, values are too low by up to 1.4e-13 after one step, 4e-13 after 10,000, 1e-12 after
#: 100,000.
_ROUNDING = 5e-13
#: Largest distance between neighbors' sums of clipped vectors, in clipping norms.
_CLIP_NORMS_APART: dict[Neighbors, float] = {"add_or_remove_one": 1.0, "replace_one": 2.0}


@dataclass(frozen=True)
class NoisySGD(ABC):
    """Privacy of training with a noisy sum of clipped gradients in each of `steps` steps; built by `noisy_sgd`.

    The noise multiplier, above 0, is the standard deviation of the noise on the sum, over the clipping norm.
    """

    noise_multiplier: float
    steps: int
    neighbors: Neighbors = "add_or_remove_one"

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise ConfigError(
                f"noise_multiplier must be above 0 and finite; got {self.noise_multiplier}: without noise there is no "
                "epsilon to state"
            )
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1; got {self.steps}")

    @abstractmethod
    def delta(self, epsilon: float) -> float:
        """The smallest delta at an epsilon of at least 0."""

    @abstractmethod
    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at a delta strictly between 0 and 1."""

    @abstractmethod
    def profile(self, epsilon: float) -> float:
        """`sup_E P(E) - e^epsilon Q(E)`, with `P` the distribution of all releases with a record and `Q` without it.

        For any real epsilon and all `neighbors`: reconstruction is limited by how much likelier a record makes outputs.
        """


@dataclass(frozen=True)
class FullBatchSGD(NoisySGD):
    """Every step uses all records; epsilon and delta are exact.

    >>> round(FullBatchSGD(noise_multiplier=5.0, steps=100).epsilon(delta=1e-5), 4)
    9.9973
    """

    @property
    def mu(self) -> float:
        """Distance between the two distributions of all releases, in standard deviations."""
        return _CLIP_NORMS_APART[self.neighbors] * math.sqrt(self.steps) / self.noise_multiplier

    def delta(self, epsilon: float) -> float:
        return gaussian_delta(self.mu, _checked(epsilon))

    def epsilon(self, delta: float) -> float:
        return gaussian_epsilon(self.mu, delta)

    def profile(self, epsilon: float) -> float:
        return gaussian_delta(math.sqrt(self.steps) / self.noise_multiplier, epsilon)


@dataclass(frozen=True)
class PoissonSGD(NoisySGD):
    """Every record is in a step's batch with probability `sampling_rate`, independently; results are upper bounds.

    They exceed the exact values by a relative 1e-6 to 1e-3, the latter for many steps or an epsilon of hundreds, and
    probabilities by up to `rounding`. One step's privacy loss is discretized to `grid_points`; the error falls with
    their square.
    """

    sampling_rate: float = 1.0
    grid_points: int = 20_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.sampling_rate <= 1:
            raise ConfigError(f"sampling_rate must be above 0 and at most 1; got {self.sampling_rate}")

    @property
    def rounding(self) -> float:
        """How far probabilities from Fourier transforms may be too low; added to them."""
        return _ROUNDING + self.steps * sys.float_info.epsilon

    @cached_property
    def _losses(self) -> list[PLDPmf]:
        """The privacy loss in all directions of the relation."""
        if self.neighbors == "replace_one":
            return [self._loss("REPLACE")]
        return [self._presence, self._loss("ADD")]

    @cached_property
    def _presence(self) -> PLDPmf:
        """The privacy loss of outputs with a record against those without."""
        return self._loss("REMOVE")

    def _loss(self, direction: str) -> PLDPmf:
        """A discrete distribution that dominates the privacy loss after all steps, between neighbors of a direction.

        The width of the grid follows from the noise, so that the time does not depend on epsilon.
        """
        from dp_accounting.pld import pld_pmf
        from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

        step = GaussianPrivacyLoss(
            self.noise_multiplier, sampling_prob=self.sampling_rate, adjacency_type=AdjacencyType[direction]
        )
        bounds = step.connect_dots_bounds()
        interval = (bounds.epsilon_upper - bounds.epsilon_lower) / self.grid_points
        lowest, highest = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
        deltas = step.get_delta_for_epsilon([interval * index for index in range(lowest, highest + 1)])
        distribution = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, lowest, highest, deltas)
        return distribution.self_compose(self.steps)

    def delta(self, epsilon: float) -> float:
        return max(self._raised(losses, _checked(epsilon)) for losses in self._losses)

    def epsilon(self, delta: float) -> float:
        log_of_delta(delta)
        if delta < 2 * self.rounding:
            raise ConfigError(
                f"delta must be at least {_rounded_up(2 * self.rounding)} for {self.steps} steps on sampled batches, "
                f"whose probabilities are rounded; got {delta:g}: raise delta, or take full batches"
            )
        return max(float(losses.get_epsilon_for_delta(delta - self.rounding)) for losses in self._losses)

    def profile(self, epsilon: float) -> float:
        return self._raised(self._presence, epsilon)

    def _raised(self, losses: PLDPmf, epsilon: float) -> float:
        return min(1.0, float(losses.get_delta_for_epsilon(epsilon)) + self.rounding)


def noisy_sgd(
    noise_multiplier: float, steps: int, sampling_rate: float = 1.0, neighbors: Neighbors = "add_or_remove_one"
) -> NoisySGD:
    """`FullBatchSGD` for a `sampling_rate` of 1, else `PoissonSGD`."""
    if sampling_rate == 1:
        return FullBatchSGD(noise_multiplier, steps, neighbors)
    return PoissonSGD(noise_multiplier, steps, neighbors, sampling_rate)


def _checked(epsilon: float) -> float:
    if not epsilon >= 0:
        raise ConfigError(f"epsilon must be at least 0; got {epsilon}")
    return epsilon


#: Relative accuracy of the root for sampled batches; replacement for an epsilon of 0, which has no logarithm.
_ACCURACY, _NOTHING = 1e-4, 1e-6
#: A coarse grid overstates epsilon a little, which gives a little more noise and saves most of the time.
_GRID_POINTS = 4_000


def calibrate_noise(
    epsilon: float, delta: float, steps: int, sampling_rate: float = 1.0, neighbors: Neighbors = "add_or_remove_one"
) -> float:
    """The least noise multiplier that keeps (epsilon, delta), exact for full batches.

    For sampled batches it is an upper bound within a relative 1e-3, and takes seconds: every trial composes
    distributions. At rates so near 1 that rounding hides what sampling gains it is the noise for full batches. A delta
    below their rounding errors is a `ConfigError`, and one above a record's probability of being used, which needs no
    noise, too.
    """
    if not epsilon > 0 or steps < 1:
        raise ConfigError(
            f"calibration needs epsilon above 0 and at least 1 step; got epsilon={epsilon}, steps={steps}"
        )
    full_batch = _CLIP_NORMS_APART[neighbors] * math.sqrt(steps) / gaussian_mu(epsilon, delta)
    if sampling_rate == 1:
        return full_batch
    used = -math.expm1(steps * math.log1p(-sampling_rate)) if 0 < sampling_rate < 1 else 1.0
    if used <= delta:
        raise ConfigError(
            f"a record is used with chance {used:.3g}, at most delta={delta:g}: no noise is needed for this guarantee, "
            "which therefore says nothing; choose delta well below 1 / number of records"
        )

    def excess(log_noise: float) -> float:
        """Logarithm of the resulting epsilon over the allowed one."""
        training = PoissonSGD(math.exp(log_noise), steps, neighbors, sampling_rate, _GRID_POINTS)
        return math.log(max(training.epsilon(delta), _NOTHING) / epsilon)

    # Sampling improves privacy, so that the noise for full batches is enough.
    enough = math.log(full_batch)
    if excess(enough) > 0:  # by rounding and the grid alone
        return full_batch
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

    A `ConfigError` says that a number is out of its range, that there is noise without a finite bound, or neither noise
    nor a budget.

    Source: Abadi et al. 2016, algorithm 1; Balle, Cherubin and Hayes 2022, section VI-D, for the default values.
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
        """The noise multiplier, at most `most` where it is chosen, of a training of so many releases.

        Every record is in a step's batch with probability `sampling_rate`; 1 for full batches. A `ConfigError` says
        that the given noise, or `most`, does not keep the budget.
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
                    f"{limit:g}: the smallest possible epsilon is {_rounded_up(smallest)}; raise the target, "
                    f"or {remedy}"
                )
        return calibrate_noise(target, self.delta, steps, sampling_rate, self.neighbors) if noise is None else noise

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
    """At least the value, to three digits."""
    if not 0 < value < math.inf:
        return f"{value:g}"
    unit = 10 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit) * unit:.3g}"
