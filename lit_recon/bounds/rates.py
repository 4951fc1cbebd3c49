"""Rates of two-layer networks: exponents measured as log-log slopes, and the orders in the theorems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lit_recon.errors import ConfigError


class Slope(NamedTuple):
    """Exponent `p` of `y ~ x^p`, with the ends of its confidence interval."""

    value: float
    low: float
    high: float


def log_slope(xs: Sequence[float], ys: Sequence[float], confidence: float = 0.95) -> Slope:
    """Least squares of `log y` on `log x`, with the interval of Student's t.

    The interval assumes a straight line: it is wide where points scatter or lie on a curve.

    Args:
        xs, ys: positive; repeated measurements share an x.
        confidence: of the interval.

    Raises:
        ConfigError: fewer than three points, fewer than two different x, or a value that has no logarithm.

    >>> log_slope([1, 2, 4], [3, 12, 48]).value
    2.0
    """
    from scipy.stats import t

    points = np.array([xs, ys], dtype=float)
    if len(xs) != len(ys) or len(xs) < 3 or len(set(xs)) < 2 or not (np.isfinite(points) & (points > 0)).all():
        raise ConfigError(
            "a slope needs three or more points with two or more different x, positive and finite; got "
            f"{len(xs)} x and {len(ys)} y"
        )
    x, y = np.log(points)
    x = x - x.mean()
    spread = float(x @ x)
    value = float(x @ y) / spread
    left = y - y.mean() - value * x
    error = math.sqrt(float(left @ left) / (len(x) - 2) / spread)
    margin = error * float(t.ppf((1 + confidence) / 2, len(x) - 2))
    return Slope(round(value, 12), value - margin, value + margin)


class Rate(NamedTuple):
    """Orders of the reconstruction error.

    Attributes:
        upper: error of the tensor attack.
        lower: lower bound on the error of every attack.
    """

    upper: str
    lower: str


#: Orders of the root of the squared error of one input up to logarithms, with the batch size B, noise s, clipping bound
#: S, gradient g, dropout rate or pruned fraction p, and the share P' of the Jacobian's squared norm that pruning takes.
RATES = {
    "none": Rate("B √(d/m)", "s √(d/m)"),
    "local_steps": Rate("B √(d/m)", "s √(d/m)"),
    "noise": Rate("(B + s) √(d/m)", "s √(d/m)"),
    "clipping": Rate("B √(d/m)", "s max(1, |g|/S) √(d/m)"),
    "dp_sgd": Rate("(B + s max(1, |g|/S)) √(d/m)", "s max(1, |g|/S) √(d/m)"),
    "dropout": Rate("B √(d/((1−p) m))", "s √(d/((1−p) m))"),
    "pruning": Rate("unknown", "s √(d/((1−P') m))"),
}
