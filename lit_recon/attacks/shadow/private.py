"""Differentially private gradient descent of shadow models: clipping, noise and privacy accounting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.defenses.dp_sgd import DPSGD
from lit_recon.defenses.vectors import normal_like
from lit_recon.errors import ConfigError
from lit_recon.privacy import FullBatchSGD, Neighbors, calibrate_noise


@dataclass(frozen=True)
class PrivateDescent:
    """In every step, clip the gradient of each image over all parameters, sum, and add Gaussian noise.

    Every model has noise of its own; the adversary does not know that of the released model. Batches are full, so that
    epsilon is exact, by the closed form of the Gaussian mechanism; momentum and Adam only post-process.

    Args:
        bound: largest norm of one image's gradient.
        noise_multiplier: standard deviation of the noise on the sum, divided by `bound`; 0: clipping only.
        target_epsilon: epsilon of the whole training, instead of `noise_multiplier`.
        delta: of (epsilon, delta)-differential privacy.
        neighbors: neighboring relation: with and without one image, or with one image replaced.

    Raises:
        ConfigError: a number is out of its range, or not exactly one of noise and epsilon is given.

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
        if not 0 < self.bound < math.inf:
            raise ConfigError(f"descent.dp.bound must be above 0 and finite, such as 1.0; got {self.bound}")
        if (noise is None) == (target is None):
            raise ConfigError(
                "descent.dp needs either noise_multiplier, such as 5.0, or target_epsilon, such as 10.0; got "
                f"{noise} and {target}"
            )
        if noise is not None and not 0 <= noise < math.inf:
            raise ConfigError(f"descent.dp.noise_multiplier must be at least 0 and finite; got {noise}")
        if target is not None and not 0 < target < math.inf:
            raise ConfigError(f"descent.dp.target_epsilon must be above 0 and finite; got {target}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"descent.dp.delta must lie strictly between 0 and 1; got {self.delta}")

    def noise(self, steps: int) -> float:
        """The noise multiplier of a training of `steps` steps."""
        if self.target_epsilon is None:
            return self.noise_multiplier or 0.0
        return calibrate_noise(self.target_epsilon, self.delta, steps, neighbors=self.neighbors)

    def mechanism(self, steps: int) -> DPSGD:
        """The mechanism applied in each of `steps` steps."""
        return DPSGD(self.bound, self.noise(steps))

    def accountant(self, steps: int) -> FullBatchSGD | None:
        """Privacy accountant of the whole training; None without noise."""
        noise = self.noise(steps)
        return FullBatchSGD(noise, steps, self.neighbors) if noise else None

    def epsilon(self, steps: int) -> float:
        """Epsilon of the whole training at `delta`; infinite without noise."""
        accountant = self.accountant(steps)
        return math.inf if accountant is None else accountant.epsilon(self.delta)


def add_noise(sums: Sequence[Tensor], mechanism: DPSGD, generators: Sequence[torch.Generator]) -> None:
    """Add to sums of clipped gradients, in place, the noise that `mechanism` would add to their mean.

    Args:
        sums: of all models, each `(s, ...)`, in the order of the network's parameters.
        mechanism: clipping and noise.
        generators: one per model; one draw per tensor, as in `DPSGD`.
    """
    std = mechanism.std(1)
    if std:
        for values in sums:
            draws = [normal_like(own, generator) for own, generator in zip(values, generators, strict=True)]
            values.add_(torch.stack(draws), alpha=std)
