"""Epsilon, delta and `mu` of the Gaussian mechanism, exact, and in log space to allow any epsilon.

`mu` is sensitivity over standard deviation of the noise; `T` adaptive releases with `mu` each compose to `sqrt(T) mu`.
All functions raise a `ConfigError` for an argument out of its range: `mu` above 0, `delta` strictly between 0 and 1.

Source: [Dong2022], corollary 2.13; Balle and Wang 2018, Improving the Gaussian mechanism for differential privacy,
theorem 8; Mironov, Talwar and Zhang 2019, Renyi differential privacy of the sampled Gaussian mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr

from lit_recon.errors import ConfigError

#: Absolute and relative accuracy of the roots.
_ACCURACY = 1e-13
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
    return float(brentq(lambda epsilon: gaussian_log_delta(mu, epsilon) - goal, 0.0, ceiling, rtol=_ACCURACY))


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
    return float(brentq(lambda mu: gaussian_log_delta(mu, epsilon) - goal, floor, ceiling, rtol=_ACCURACY, xtol=1e-300))


#: Orders from near 1, for large epsilons, to 512, for small ones.
ORDERS = (*(1 + 0.02 * i for i in range(1, 50)), *(2 + 0.25 * i for i in range(32)), *range(10, 64), 64, 128, 256, 512)


def renyi_curve(
    noise_multiplier: float, steps: int, sampling_rate: float = 1.0, orders: Sequence[float] = ORDERS
) -> list[float]:
    """Renyi divergence at each order above 1, between outputs with and without a record (`add_or_remove_one`).

    The noise multiplier, above 0, is over the clipping norm; a record is in each of the `steps` batches with
    probability `sampling_rate` in (0, 1].
    """
    if noise_multiplier <= 0 or steps < 1 or not 0 < sampling_rate <= 1 or min(orders, default=0) <= 1:
        raise ConfigError(
            "a Renyi curve needs noise_multiplier above 0, steps of at least 1, sampling_rate in (0, 1] and orders "
            f"above 1; got {noise_multiplier}, {steps}, {sampling_rate} and {min(orders, default=None)}"
        )
    from opacus.accountants.analysis.rdp import compute_rdp

    curve = compute_rdp(q=sampling_rate, noise_multiplier=noise_multiplier, steps=steps, orders=list(orders))
    return [float(divergence) for divergence in curve]
