"""The best bound on reconstruction that follows from a mechanism's whole privacy profile.

The chance of an attack is at most `kappa e^epsilon + delta(epsilon)` for every epsilon, also below 0; by the
Neyman-Pearson lemma the least of these is reached by an attack, if `delta` is exact.

Sources:
    Hayes, Mahloujifar and Balle 2023, Bounding training data reconstruction in DP-SGD, theorem 2.
    Dong, Roth and Su 2022, Gaussian differential privacy, proposition 2.12.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize_scalar

from lit_recon.errors import ConfigError

#: Chances farther than this from 1 are told from 1.
_LEAST_LOG_RATIO = -50.0
#: To find the valley by; any epsilon gives a valid bound, so that missing the least one only loosens it.
_GRID_POINTS = 65


def profile_bound(log_kappa: float, profile: Callable[[float], float]) -> float:
    """The least `kappa e^epsilon + delta(epsilon)` over all real epsilon.

    Args:
        log_kappa: of the baseline error.
        profile: `sup_E P(E) - e^epsilon Q(E)` at any real epsilon, for `P` the outputs with the record and `Q` those
            without; any upper bound of it gives a valid gamma.

    Raises:
        ConfigError: if `log_kappa` is above 0 or not finite.

    >>> from scipy.special import ndtr
    >>> noise = lambda epsilon: float(ndtr(0.5 - epsilon) - math.exp(epsilon) * ndtr(-0.5 - epsilon))
    >>> round(profile_bound(math.log(0.1), noise), 9)
    0.389143692
    """
    if not -math.inf < log_kappa <= 0:
        raise ConfigError(f"log_kappa must be finite and at most 0; got {log_kappa}: kappa is a probability above 0")

    def chance(epsilon: float) -> float:
        return math.exp(log_kappa + epsilon) + profile(epsilon)

    # Convex in e^epsilon, the sum has one valley, but around it a plain at 1; beyond log 1/kappa it exceeds 1.
    grid = np.linspace(_LEAST_LOG_RATIO, -log_kappa, _GRID_POINTS)
    lowest = int(np.argmin([chance(epsilon) for epsilon in grid]))
    valley = (grid[max(lowest - 1, 0)], grid[min(lowest + 1, _GRID_POINTS - 1)])
    found = minimize_scalar(chance, bounds=valley, method="bounded", options={"xatol": 1e-7})
    return min(1.0, float(found.fun), chance(grid[lowest]))
