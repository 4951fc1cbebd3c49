"""What a private training is to guarantee: settings, and the mechanism that they come to for given data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lit_recon.errors import ConfigError
from lit_recon.privacy import Neighbors, calibrate_noise, noisy_sgd

#: More noise than this is asked for by no training that learns; a smaller epsilon counts as out of reach.
_MOST_NOISE = 1000.0


@dataclass(frozen=True)
class PrivacyPlan:
    """A mechanism and how often it may run.

    Attributes:
        noise_multiplier: standard deviation of the noise on the sum of clipped gradients, over `max_grad_norm`.
        max_grad_norm: norm that a single example's gradient is clipped to.
        sampling_rate: chance of an image to enter a step's batch.
        batch_size: expected number of images in a batch, over all processes: the divisor of the sum.
        steps_per_epoch: the same number as in plain training.
        delta: of the guarantee.
        neighbors: the relation of the guarantee.
    """

    noise_multiplier: float
    max_grad_norm: float
    sampling_rate: float
    batch_size: int
    steps_per_epoch: int
    delta: float
    neighbors: Neighbors

    @property
    def accountant(self) -> str:
        """How epsilon is computed."""
        return "closed form (Gaussian)" if self.sampling_rate == 1 else "privacy loss distribution (dp-accounting)"

    def epsilon(self, steps: int) -> float:
        """What has been spent after so many steps; infinite without noise, 0 before the first step."""
        if steps == 0:
            return 0.0
        if self.noise_multiplier == 0 or self.max_grad_norm == math.inf:
            return math.inf
        return noisy_sgd(self.noise_multiplier, steps, self.sampling_rate, self.neighbors).epsilon(self.delta)


@dataclass(frozen=True)
class PrivacySettings:
    """DP-SGD through Opacus: Poisson-sampled batches, clipped gradients of single images, Gaussian noise.

    Everything that the guarantee covers follows from the training images; their normalization is measured without
    noise and not covered, nor is a seed that others know: it tells the noise.

    Args:
        max_grad_norm: norm that the gradient of a single image is clipped to; 0 lets nothing but weight decay move the
            weights; required with noise.
        noise_multiplier: standard deviation of the noise on the sum of a batch's clipped gradients, over
            max_grad_norm; default: what target_epsilon asks for.
        target_epsilon: budget of the whole training; the noise is chosen for it, or checked against it if given.
        delta: chance that the guarantee fails; below 1 / number of training images.
        neighbors: data sets that must look alike: with and without one image, or with one image replaced.

    Raises:
        ConfigError: a number out of its range, noise without a bound, or neither noise nor a budget.
    """

    max_grad_norm: float = math.inf
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    delta: float = 1e-5
    neighbors: Neighbors = "add_or_remove_one"

    def __post_init__(self) -> None:
        if not self.max_grad_norm >= 0:
            raise ConfigError(_out_of_range("max_grad_norm", "at least 0", self.max_grad_norm, "0"))
        noise, target = self.noise_multiplier, self.target_epsilon
        if noise is None and target is None:
            raise ConfigError("dp needs a noise_multiplier, such as 1.0, or a target_epsilon, such as 8.0; got neither")
        if noise is not None and not 0 <= noise < math.inf:
            raise ConfigError(_out_of_range("noise_multiplier", "at least 0 and finite", noise, "0"))
        if target is not None and not 0 < target < math.inf:
            raise ConfigError(_out_of_range("target_epsilon", "above 0 and finite", target, "a small one, such as 0.1"))
        if not 0 < self.delta < 1:
            raise ConfigError(_out_of_range("delta", "strictly between 0 and 1", self.delta, "1e-5"))
        if self.max_grad_norm == math.inf and (target is not None or noise):
            raise ConfigError(
                "dp.max_grad_norm is infinite, but noise is scaled by it: give the norm to clip to, usually 1.0, or "
                "set dp.noise_multiplier to 0 and leave dp.target_epsilon out"
            )

    def plan(self, n_images: int, batch_size: int, epochs: int) -> PrivacyPlan:
        """The mechanism for a training set and a number of epochs.

        Args:
            n_images: in the training set.
            batch_size: expected number of images per step, over all processes.
            epochs: of the whole training, at least 1.

        Raises:
            ConfigError: a batch larger than the data, a delta that guarantees nothing, or an epsilon out of reach.
        """
        if not 1 <= batch_size <= n_images:
            raise ConfigError(
                f"private batches are samples of the {n_images} training images, {batch_size} of them on average: the "
                f"nearest valid batch_size is {min(max(batch_size, 1), n_images)}"
            )
        if self.delta * n_images >= 1:
            raise ConfigError(
                f"dp.delta={self.delta:g} would allow to publish one of {n_images} training images: choose it below "
                f"{1 / n_images:.2g}, such as {0.1 / n_images:.1g}"
            )
        rate, per_epoch = batch_size / n_images, math.ceil(n_images / batch_size)
        noise = self._noise(rate, per_epoch * epochs)
        return PrivacyPlan(noise, self.max_grad_norm, rate, batch_size, per_epoch, self.delta, self.neighbors)

    def _noise(self, rate: float, steps: int) -> float:
        noise, target = self.noise_multiplier, self.target_epsilon
        if target is None:
            return noise or 0.0
        given = noise is not None
        most = noise if noise is not None else _MOST_NOISE
        smallest = noisy_sgd(most, steps, rate, self.neighbors).epsilon(self.delta) if most else math.inf
        if target < smallest:
            remedy = "leave dp.noise_multiplier out to have it chosen" if given else "take fewer epochs"
            raise ConfigError(
                f"dp.target_epsilon={target:g} cannot be reached in {steps} steps with a noise multiplier of {most:g}: "
                f"the smallest epsilon that can is {_rounded_up(smallest)}; raise the target, or {remedy}"
            )
        return most if given else calibrate_noise(target, self.delta, steps, rate, self.neighbors)


def _out_of_range(name: str, expected: str, got: float, nearest: str) -> str:
    return f"dp.{name} must be {expected}; got {got:g}: the nearest valid choice is {nearest}"


def _rounded_up(value: float) -> str:
    """Three digits that the value does not exceed.

    >>> _rounded_up(1.23401)
    '1.24'
    """
    if not 0 < value < math.inf:
        return f"{value:g}"
    unit = 10 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit) * unit:.3g}"
