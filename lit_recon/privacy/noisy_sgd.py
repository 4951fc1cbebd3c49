"""Training whose every step releases a noisy sum of clipped gradients, and the privacy that this leaves a record."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lit_recon.errors import ConfigError
from lit_recon.privacy.gaussian import gaussian_delta, gaussian_epsilon
from lit_recon.privacy.neighbors import Neighbors, clip_norms_apart
from lit_recon.privacy.privacy_loss import Direction, loss_distribution

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf


@dataclass(frozen=True)
class NoisySGD(ABC):
    """What all noisy training has; see `noisy_sgd` for the choice between its kinds.

    Args:
        noise_multiplier: standard deviation of the noise on the sum of clipped gradients, over the clipping norm.
        steps: number of releases.
        neighbors: the relation under which epsilon and delta are stated.

    Raises:
        ConfigError: if the noise multiplier is not above 0 or there is no step.
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
        """The least delta at an epsilon of at least 0."""

    @abstractmethod
    def epsilon(self, delta: float) -> float:
        """The least epsilon at a delta strictly between 0 and 1."""

    @abstractmethod
    def profile(self, epsilon: float) -> float:
        """`sup_E P(E) - e^epsilon Q(E)`, with `P` the law of all releases with a record and `Q` the law without it.

        One direction of `add_or_remove_one`, whatever `neighbors` says, at any real epsilon: what limits
        reconstruction is how likely an output became through the record.
        """


@dataclass(frozen=True)
class FullBatchSGD(NoisySGD):
    """Every step uses all records; epsilon and delta are exact.

    >>> round(FullBatchSGD(noise_multiplier=5.0, steps=100).epsilon(delta=1e-5), 4)
    9.9973
    """

    @property
    def mu(self) -> float:
        """Distance of the two laws of all releases, in standard deviations."""
        return clip_norms_apart(self.neighbors) * math.sqrt(self.steps) / self.noise_multiplier

    @property
    def rho(self) -> float:
        """The constant of zero-concentrated privacy: Renyi divergence of every order alpha is `alpha rho`."""
        return self.mu**2 / 2

    def delta(self, epsilon: float) -> float:
        return gaussian_delta(self.mu, _checked(epsilon))

    def epsilon(self, delta: float) -> float:
        return gaussian_epsilon(self.mu, delta)

    def profile(self, epsilon: float) -> float:
        return gaussian_delta(math.sqrt(self.steps) / self.noise_multiplier, epsilon)


@dataclass(frozen=True)
class PoissonSGD(NoisySGD):
    """Every record enters a step's batch with chance `sampling_rate`, independently; figures are upper bounds.

    They exceed the exact ones by 1e-6 to 1e-3 of themselves, the latter over many steps or at an epsilon of hundreds.

    Args:
        sampling_rate: chance of a record to enter a batch, in (0, 1].
        grid_points: of the discretization of one step's privacy loss; the excess falls with their square.

    Raises:
        ConfigError: if the sampling rate is out of its range.
    """

    sampling_rate: float = 1.0
    grid_points: int = 20_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.sampling_rate <= 1:
            raise ConfigError(f"sampling_rate must be above 0 and at most 1; got {self.sampling_rate}")

    @cached_property
    def _losses(self) -> list[PLDPmf]:
        """The loss in all directions of the relation."""
        if self.neighbors == "replace_one":
            return [self._distribution("replace")]
        return [self._presence, self._distribution("add")]

    @cached_property
    def _presence(self) -> PLDPmf:
        return self._distribution("remove")

    def _distribution(self, direction: Direction) -> PLDPmf:
        return loss_distribution(self.noise_multiplier, self.sampling_rate, self.steps, direction, self.grid_points)

    def delta(self, epsilon: float) -> float:
        return max(float(losses.get_delta_for_epsilon(_checked(epsilon))) for losses in self._losses)

    def epsilon(self, delta: float) -> float:
        if not 0 < delta < 1:
            raise ConfigError(f"delta must lie strictly between 0 and 1; got {delta}")
        return max(float(losses.get_epsilon_for_delta(delta)) for losses in self._losses)

    def profile(self, epsilon: float) -> float:
        return float(self._presence.get_delta_for_epsilon(epsilon))


def noisy_sgd(
    noise_multiplier: float, steps: int, sampling_rate: float = 1.0, neighbors: Neighbors = "add_or_remove_one"
) -> NoisySGD:
    """Exact accounting for full batches, privacy-loss distributions for sampled ones.

    >>> noisy_sgd(noise_multiplier=1.0, steps=10)
    FullBatchSGD(noise_multiplier=1.0, steps=10, neighbors='add_or_remove_one')
    """
    if sampling_rate == 1:
        return FullBatchSGD(noise_multiplier, steps, neighbors)
    return PoissonSGD(noise_multiplier, steps, neighbors, sampling_rate)


def _checked(epsilon: float) -> float:
    if not epsilon >= 0:
        raise ConfigError(f"epsilon must be at least 0; got {epsilon}")
    return epsilon
