"""The privacy loss of noisy SGD with Poisson-sampled batches, discretized by dp-accounting, always on the safe side.

Opacus' PRV accountant is not used: below a noise multiplier of about 0.3 it does not come back.

Source: Doroshenko et al. 2022, Connect the dots: tighter discrete approximations of privacy loss distributions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf

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
