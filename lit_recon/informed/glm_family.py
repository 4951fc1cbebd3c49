"""Families of generalized linear models: how the expected target depends on the linear predictor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

#: Vectors and matrices of this room; closed forms are computed in double precision throughout.
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Family(ABC):
    """A model that minimizes `sum_i [b(t_i) - y_i t_i]` over linear predictors `t`, for a convex `b`."""

    @abstractmethod
    def mean(self, t: Array) -> Array:
        """Expected target `b'(t)`."""

    @abstractmethod
    def slope(self, t: Array) -> Array:
        """Derivative `b''(t)` of the expected target."""

    @abstractmethod
    def nearest(self, y: float) -> float:
        """The admissible target nearest to `y`; `y` itself where all numbers are admissible."""


@dataclass(frozen=True)
class Gaussian(Family):
    """Linear regression, with or without ridge: any target, `b(t) = t^2 / 2`."""

    def mean(self, t: Array) -> Array:
        return t

    def slope(self, t: Array) -> Array:
        return np.ones_like(t)

    def nearest(self, y: float) -> float:
        return y


@dataclass(frozen=True)
class Bernoulli(Family):
    """Logistic regression: targets 0 and 1, `b(t) = log(1 + e^t)`."""

    def mean(self, t: Array) -> Array:
        return np.asarray(expit(t), dtype=np.float64)

    def slope(self, t: Array) -> Array:
        return self.mean(t) * self.mean(-t)

    def nearest(self, y: float) -> float:
        return float(y > 0.5)


@dataclass(frozen=True)
class Poisson(Family):
    """Poisson regression with logarithmic link: counts, `b(t) = e^t`."""

    def mean(self, t: Array) -> Array:
        return np.exp(t)

    def slope(self, t: Array) -> Array:
        return np.exp(t)

    def nearest(self, y: float) -> float:
        return max(0.0, float(round(y)))
