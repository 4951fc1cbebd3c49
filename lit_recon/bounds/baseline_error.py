"""Baseline error `kappa`: probability that the best guess from the prior alone is within the threshold `eta`.

`kappa = sup_z0 P[loss(Z, z0) <= eta]` over the prior of `Z`, here for Euclidean distances. For images it is often below
the smallest float, and a bound computed from a kappa of 0 would be wrong at large epsilon; so all functions use its
logarithm. They raise a `ConfigError` unless thresholds, radii and standard deviations are above 0, dimensions at least
1 and probabilities valid, and a `ShapeError` where there are no samples.

Source: Balle, Cherubin and Hayes 2022, Reconstructing training data with informed adversaries, section VII.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainc, gammaincc

from lit_recon.errors import ConfigError, ShapeError

#: Above this the function is computed directly.
_REPRESENTABLE = 1e-200


def log_gamma_tail(shape: float, x: float) -> float:
    """`log P(shape, x)`, relative error about 1e-13; `P(d/2, t/2)` is the probability of chi-square with d below t."""
    direct = float(gammainc(shape, x))
    if direct > 0.5:
        return math.log1p(-float(gammaincc(shape, x)))
    if direct > _REPRESENTABLE:
        return math.log(direct)
    # x is far below the mean here, so that the terms x^j / ((shape+1)...(shape+j)) fall quickly.
    term = total = 1.0
    j = 0
    while term > 1e-17 * total:
        j += 1
        term *= x / (shape + j)
        total += term
    return shape * math.log(x) - x - math.lgamma(shape + 1) + math.log(total)


#: Distances computed at a time; rounding error of a squared distance, relative to the largest squared norm.
_CHUNK, _ROUNDING = 250_000, 1e-12


@dataclass(frozen=True)
class BaselineError:
    """The natural logarithm of kappa, at most 0, and why bounds from it may not hold.

    The caveat is empty where kappa is exact or an upper bound.
    """

    log_kappa: float
    caveat: str = ""

    @property
    def kappa(self) -> float:
        """Kappa, 0 if below the smallest float."""
        return math.exp(self.log_kappa)


def finite_prior(probabilities: Sequence[float]) -> BaselineError:
    """Exact recovery of one of finitely many candidates: the largest of their probabilities, which sum to 1."""
    if not probabilities or min(probabilities) < 0 or abs(math.fsum(probabilities) - 1) > 1e-9:
        raise ConfigError(
            "a finite prior needs probabilities of at least 0 that sum to 1; check their number and scale"
        )
    return BaselineError(math.log(max(probabilities)))


def uniform_ball(eta: float, dimension: int, radius: float = 1.0) -> BaselineError:
    """Prior uniform on a ball: `(eta / radius)^dimension`. Source: proposition 6 of the paper."""
    _check("a ball", dimension, eta=eta, radius=radius)
    return BaselineError(min(0.0, dimension * math.log(eta / radius)))


def gaussian_prior(eta: float, sigma: float, dimension: int) -> BaselineError:
    """Prior `N(w, sigma^2 I)`: exact, by the lower tail of chi-square.

    Source: proposition 7 of the paper, whose proof shows that the mean is the best guess.

    >>> round(gaussian_prior(eta=14.0, sigma=1.0, dimension=784).log_kappa, 3)
    -253.046
    """
    _check("a Gaussian prior", dimension, eta=eta, sigma=sigma)
    return BaselineError(log_gamma_tail(dimension / 2, (eta / sigma) ** 2 / 2))


def gaussian_prior_chernoff(eta: float, sigma: float, dimension: int) -> BaselineError:
    """The paper's upper bound of `gaussian_prior`: `(d/2) (1 - t + log t)` with `t = eta^2 / (sigma^2 d)`."""
    _check("a Gaussian prior", dimension, eta=eta, sigma=sigma)
    t = min(1.0, (eta / sigma) ** 2 / dimension)
    return BaselineError(dimension / 2 * (1 - t + math.log(t)))


def empirical_prior(samples: NDArray[np.floating], eta: float) -> BaselineError:
    """The largest share of samples `(m, ...)` within `eta` of one of them: an underestimate of kappa."""
    return BaselineError(
        math.log(_largest_share(samples, eta)),
        "kappa was estimated from a sample, with sample points as guesses: the true kappa may be larger, and bounds "
        "computed from it are estimates, not certificates",
    )


def empirical_prior_ceiling(samples: NDArray[np.floating], eta: float) -> BaselineError:
    """An upper bound of kappa for the prior that draws one of the samples `(m, ...)`.

    Samples within `eta` of any point lie within `2 eta` of each other: the bound is the largest share within `2 eta`.
    """
    return BaselineError(
        math.log(_largest_share(samples, 2 * eta)),
        "kappa is certified for a prior that draws one of the samples, not for the distribution that they come from",
    )


def _check(prior: str, dimension: int, **positive: float) -> None:
    if min(positive.values()) <= 0 or dimension < 1:
        raise ConfigError(
            f"{prior} needs {' and '.join(positive)} above 0 and a dimension of at least 1; got "
            f"{', '.join(map(str, positive.values()))} and {dimension}"
        )


def _largest_share(samples: NDArray[np.floating], eta: float) -> float:
    if not eta > 0:
        raise ConfigError(f"eta must be above 0; got {eta}")
    if samples.ndim < 2 or not len(samples):
        raise ShapeError(f"samples must be (m, d) with m of at least 1; got shape {samples.shape}")
    points = np.asarray(samples, dtype=np.float64).reshape(len(samples), -1)
    squares = (points**2).sum(1)
    rows = max(1, _CHUNK // len(points))
    # Distances by inner products, faster than by differences; the margin includes samples exactly at the threshold.
    limit = eta**2 + _ROUNDING * float(squares.max())
    most = max(
        int((squares[part, None] + squares - 2 * points[part] @ points.T <= limit).sum(1).max())
        for part in (slice(start, start + rows) for start in range(0, len(points), rows))
    )
    return most / len(points)
