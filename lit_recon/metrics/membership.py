"""Scores of membership inference with 95 % confidence intervals that do not collapse where every guess is right.

Scores are `(m,)`, members 0 or 1 `(m,)`; a ShapeError says that lengths differ, one of the two kinds is missing, or a
score is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binomtest, norm

from lit_recon.errors import ShapeError

Array = NDArray[np.float64]
_CONFIDENCE = 0.95
_INSIDE = 1e-12  # distance from 0 and 1 at which ends of an interval are looked for


class Estimate(NamedTuple):
    """A value and the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def advantage(scores: Array, members: Array) -> Estimate:
    """`2 P(right) - 1` of guessing "member" where the score is above 0; interval of Clopper and Pearson.

    With as many members as others this is the true positive rate less the false positive rate.
    """
    scores, members = _checked(scores, members)
    right = int(((scores > 0) == (members == 1)).sum())
    return Estimate(*(2 * value - 1 for value in binomial_rate(right, len(scores))))


def area_under_roc(scores: Array, members: Array) -> Estimate:
    """Probability that a member's score is above that of a non-member; 0.5 is chance.

    The interval inverts a score test with the variance of Hanley and McNeil, which does not collapse at 0 and 1.

    Source: Newcombe 2006, Confidence intervals for an effect size measure based on the Mann-Whitney statistic, part 2,
    method 5.
    """
    from sklearn.metrics import roc_auc_score

    scores, members = _checked(scores, members)
    value = float(roc_auc_score(members, scores))
    n_members = int(members.sum())
    n_others = len(members) - n_members
    z = norm.ppf(0.5 + _CONFIDENCE / 2)

    def excess(theta: float) -> float:
        more = ((n_members + n_others) / 2 - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        # Divided by theta (1 - theta), which would add roots at 0 and 1.
        return float((value - theta) ** 2 / (theta * (1 - theta)) - z**2 * (1 + more) / (n_members * n_others))

    low = 0.0 if value == 0 else float(brentq(excess, _INSIDE, min(value, 1 - _INSIDE)))
    high = 1.0 if value == 1 else float(brentq(excess, max(value, _INSIDE), 1 - _INSIDE))
    return Estimate(value, low, high)


def true_positive_rate(scores: Array, members: Array, false_positive_rate: float) -> Estimate:
    """Share of members found at the best threshold with at most a given false positive rate, in [0, 1].

    The interval of Clopper and Pearson takes the threshold for given.
    """
    from sklearn.metrics import roc_curve

    scores, members = _checked(scores, members)
    false, true, _ = roc_curve(members, scores, drop_intermediate=False)
    best = float(true[false <= false_positive_rate + 1e-12].max())
    n_members = int(members.sum())
    return binomial_rate(round(best * n_members), n_members)


def binomial_rate(successes: int, n: int) -> Estimate:
    """The share of `successes` in `n` independent trials, with the interval of Clopper and Pearson."""
    interval = binomtest(successes, n).proportion_ci(_CONFIDENCE, method="exact")
    return Estimate(successes / n, float(interval.low), float(interval.high))


def _checked(scores: Array, members: Array) -> tuple[Array, Array]:
    scores, members = np.asarray(scores, dtype=np.float64), np.asarray(members)
    kinds = set(np.unique(members).tolist())
    if scores.ndim != 1 or scores.shape != members.shape or kinds != {0, 1} or np.isnan(scores).any():
        raise ShapeError(
            "membership needs scores (m,) that are no NaN, and members (m,) of both kinds, 0 and 1; "
            f"got {scores.shape} and {members.shape} of {sorted(kinds)}"
        )
    return scores, members
