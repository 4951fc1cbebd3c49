"""Epsilon, delta and `mu` of the Gaussian mechanism, exact, and in log space to allow any epsilon.

`mu` is sensitivity over standard deviation of the noise; `T` adaptive releases with `mu` each compose to `sqrt(T) mu`.
All functions raise a `ConfigError` for an argument out of its range: `mu` above 0, `delta` strictly between 0 and 1.

Source: [Dong2022], corollary 2.13; Balle and Wang 2018, Improving the Gaussian mechanism for differential privacy,
theorem 8.
"""

from __future__ import annotations

import math

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
