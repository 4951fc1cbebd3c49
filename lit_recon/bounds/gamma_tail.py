"""Logarithm of the regularized lower incomplete gamma function, where the function itself is below the least float."""

from __future__ import annotations

import math

from scipy.special import gammainc, gammaincc

#: Above this the function is computed directly.
_REPRESENTABLE = 1e-200


def log_gamma_tail(shape: float, x: float) -> float:
    """`log P(shape, x)`, accurate to about 1e-13 of itself; `P(d/2, t/2)` is the chance of chi-square with d below t.

    Args:
        shape: above 0.
        x: above 0.

    >>> log_gamma_tail(1.0, 1e-3) == math.log(-math.expm1(-1e-3))
    True
    """
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
