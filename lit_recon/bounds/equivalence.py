"""From reconstruction back to privacy: who cannot tell two candidates apart cannot tell members from others.

Source: Balle, Cherubin and Hayes 2022, Reconstructing training data with informed adversaries, theorem 5.
"""

from __future__ import annotations

import math

from lit_recon.errors import ConfigError


def two_point_baseline(epsilon: float) -> float:
    """Baseline error of the theorem's priors, two candidates with odds `e^epsilon` to 1: no attack has a lower chance.

    >>> two_point_baseline(0.0)
    0.5
    """
    _check(epsilon)
    return 1 / (1 + math.exp(-epsilon))


def privacy_from_robustness(epsilon: float, gamma: float) -> float:
    """The delta at `epsilon` of a mechanism whose every pair of candidates is told apart with chance at most `gamma`.

    Args:
        epsilon: at least 0; the two candidates have odds `e^epsilon` to 1.
        gamma: bound on the chance of naming the right one, at least that of the constant guess.

    Returns:
        `(1 + e^epsilon) gamma - e^epsilon`, in [0, 1]; exact if `gamma` is the chance of the best attack.

    Raises:
        ConfigError: if no mechanism has such a gamma.

    >>> round(privacy_from_robustness(1.0, 0.75), 10)
    0.0704295429
    """
    least = two_point_baseline(epsilon)
    if not least - 1e-12 <= gamma <= 1:
        raise ConfigError(
            f"gamma must lie between {least:.6g} and 1 for epsilon={epsilon}: guessing the likelier candidate succeeds "
            f"that often; got {gamma}"
        )
    # In terms of the chance to fail, so that a large epsilon does not overflow.
    return max(0.0, gamma - (1 - gamma) * math.exp(epsilon)) if gamma < 1 else 1.0


def robustness_from_privacy(epsilon: float, delta: float) -> float:
    """The chance of the best attack on the theorem's priors, given the exact delta at `epsilon`: the inverse.

    >>> round(robustness_from_privacy(1.0, 0.1269367375), 10)
    0.7651971252
    """
    _check(epsilon)
    if not 0 <= delta <= 1:
        raise ConfigError(f"delta must lie in [0, 1]; got {delta}")
    return (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon))


def _check(epsilon: float) -> None:
    if not 0 <= epsilon < math.inf:
        raise ConfigError(f"epsilon must be at least 0 and finite; got {epsilon}")
