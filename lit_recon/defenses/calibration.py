"""Equal utility: the strength of a defense at which a measured utility takes a given value."""

from __future__ import annotations

import math
from collections.abc import Callable

from lit_recon.errors import ConfigError


def matched_scale(utility: Callable[[float], float], target: float, low: float, high: float, steps: int = 20) -> float:
    """The scale in [low, high] at which a monotone `utility` meets `target`, by bisection of its logarithm.

    Args:
        utility: measured figure at a scale, for example the final training loss; falling or rising.
        target: the figure to match, for example that of uniform noise.
        low, high: positive, on either side of the answer.
        steps: measurements besides the two ends.

    Raises:
        ConfigError: the ends are not positive and in order, or do not enclose the target.

    >>> round(matched_scale(lambda scale: scale**2, target=9.0, low=1.0, high=10.0), 3)
    3.0
    """
    if not 0 < low < high < math.inf:
        raise ConfigError(f"matched_scale needs 0 < low < high, both finite; got low={low:g} and high={high:g}")
    at_low, at_high = utility(low), utility(high)
    if not min(at_low, at_high) <= target <= max(at_low, at_high):
        nearest = low if abs(at_low - target) < abs(at_high - target) else high
        raise ConfigError(
            f"no scale in [{low:g}, {high:g}] reaches {target:g}: the utility goes from {at_low:g} to {at_high:g}; "
            f"the nearest is {nearest:g}: widen the interval"
        )
    rising = at_high > at_low
    for _ in range(steps):
        middle = math.sqrt(low * high)
        if (utility(middle) < target) == rising:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
