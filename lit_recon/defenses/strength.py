"""Strengths outside their range are refused before anything runs, with the nearest valid choice."""

from __future__ import annotations

import math

from lit_recon.errors import ConfigError


def checked(owner: object, name: str, value: float, low: float = 0.0, high: float = math.inf) -> float:
    """`value`, if it lies in [low, high].

    Raises:
        ConfigError: it does not, or is not a number.
    """
    if not low <= value <= high:
        nearest = high if value > high else low
        interval = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ConfigError(
            f"{type(owner).__name__} needs {name} {interval}; got {value:g}: the nearest valid choice is {nearest:g}"
        )
    return value


def checked_finite(owner: object, name: str, value: float) -> float:
    """`value`, if it is finite and not negative.

    Raises:
        ConfigError: it is not.
    """
    if value == math.inf:
        raise ConfigError(f"{type(owner).__name__} needs a finite {name}; got inf")
    return checked(owner, name, value)
