"""Training whose every step releases a noisy sum of clipped gradients, and the privacy that this leaves a record.

`add_or_remove_one`: one has a record that the other lacks; sums of vectors clipped to norm `C` differ by at most `C`.
`replace_one`: both have `n` records, one of them different; the sums differ by at most `2 C`, so that twice the noise
is needed for the same epsilon. This is the relation of Balle et al. 2022.

Opacus' PRV accountant is not used: below a noise multiplier of about 0.3 it does not come back.

Source: Doroshenko et al. 2022, Connect the dots: tighter discrete approximations of privacy loss distributions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from lit_recon.errors import ConfigError
from lit_recon.privacy.gaussian import gaussian_delta, gaussian_epsilon

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf

Neighbors = Literal["add_or_remove_one", "replace_one"]


def clip_norms_apart(neighbors: Neighbors) -> float:
    """How far neighbors' sums of clipped vectors can lie apart, in clipping norms.

    >>> clip_norms_apart("add_or_remove_one"), clip_norms_apart("replace_one")
    (1.0, 2.0)
    """
    return 1.0 if neighbors == "add_or_remove_one" else 2.0


#: Outputs with a record against those without, the other way round, and with one record against another.
Direction = Literal["remove", "add", "replace"]


def loss_distribution(
    noise_multiplier: float, sampling_rate: float, steps: int, direction: Direction, grid_points: int
) -> PLDPmf:
    """Distribution of the privacy loss after all steps, as a discrete one that dominates it.

    The grid is as wide as the noise makes the loss, so that the time does not depend on epsilon.

    Args:
        noise_multiplier: standard deviation of the noise over the clipping norm, above 0.
        sampling_rate: chance of a record to enter a step's batch, in (0, 1].
        steps: number of noisy sums, at least 1.
        direction: which of two neighbors the outputs are drawn from.
        grid_points: values of one step's loss; the excess over the exact figures falls with their square.
    """
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    step = GaussianPrivacyLoss(
        noise_multiplier, sampling_prob=sampling_rate, adjacency_type=AdjacencyType[direction.upper()]
    )
    bounds = step.connect_dots_bounds()
    interval = (bounds.epsilon_upper - bounds.epsilon_lower) / grid_points
    lowest, highest = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
    deltas = step.get_delta_for_epsilon([interval * index for index in range(lowest, highest + 1)])
    distribution = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, lowest, highest, deltas)
    return distribution.self_compose(steps)


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
