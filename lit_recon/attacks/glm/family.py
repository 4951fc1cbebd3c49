"""Families of generalized linear models: how the expected target depends on the linear predictor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from lit_recon.errors import ShapeError, UnsupportedModelError

#: Vectors and matrices; closed forms are computed in double precision throughout.
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Family(ABC):
    """A model that minimizes `sum_i [b(t_i) - y_i t_i]` over linear predictors `t`, for a convex `b`."""

    #: One linear predictor for each of k classes, on the last axis; targets are one-hot vectors.
    is_multinomial: ClassVar[bool] = False
    admits_all: ClassVar[bool] = False  # whether every number is an admissible target

    @abstractmethod
    def mean(self, t: Array) -> Array:
        """Expected target `b'(t)`."""

    @abstractmethod
    def slope(self, t: Array) -> Array:
        """Derivative of the mean by its own predictor."""

    @abstractmethod
    def nearest(self, y: Array) -> Array:
        """The admissible targets nearest to `y`."""

    def steepness(self, t: Array) -> float:
        """First-order bound on the change of the mean at `t` per unit of the largest change of a predictor."""
        return float(self.slope(t).max())

    def encoded(self, targets: Array, k: int) -> Array:
        """Targets `(n,)` as the model predicts them, `(n, k)`; ShapeError if one is not admissible."""
        if not np.array_equal(self.nearest(targets), targets):
            raise ShapeError(
                f"known targets must be admissible for {self}; got {np.unique(targets)[:5]}: number the classes"
            )
        return targets[:, None]


@dataclass(frozen=True)
class Gaussian(Family):
    """Linear regression, with or without ridge: any target, `b(t) = t^2 / 2`."""

    admits_all: ClassVar[bool] = True

    def mean(self, t: Array) -> Array:
        return t

    def slope(self, t: Array) -> Array:
        return np.ones_like(t)

    def nearest(self, y: Array) -> Array:
        return y


@dataclass(frozen=True)
class Bernoulli(Family):
    """Logistic regression: targets 0 and 1, `b(t) = log(1 + e^t)`."""

    def mean(self, t: Array) -> Array:
        return np.asarray(expit(t), dtype=np.float64)

    def slope(self, t: Array) -> Array:
        return self.mean(t) * self.mean(-t)

    def nearest(self, y: Array) -> Array:
        return np.asarray(y > 0.5, dtype=np.float64)


@dataclass(frozen=True)
class Poisson(Family):
    """Poisson regression with logarithmic link: counts, `b(t) = e^t`."""

    def mean(self, t: Array) -> Array:
        return np.exp(t)

    def slope(self, t: Array) -> Array:
        return np.exp(t)

    def nearest(self, y: Array) -> Array:
        return np.maximum(0.0, np.round(y))


@dataclass(frozen=True)
class Multinomial(Family):
    """Logistic regression of k classes, `b(t) = log sum_j e^t_j`."""

    is_multinomial: ClassVar[bool] = True

    def mean(self, t: Array) -> Array:
        return np.asarray(softmax(t, axis=-1), dtype=np.float64)

    def slope(self, t: Array) -> Array:
        return self.mean(t) * (1 - self.mean(t))

    def nearest(self, y: Array) -> Array:
        return np.asarray(np.eye(y.shape[-1])[y.argmax(-1)])

    def steepness(self, t: Array) -> float:
        return 0.5  # a probability changes by at most half of the largest change of a predictor

    def encoded(self, targets: Array, k: int) -> Array:
        if not np.isin(targets, np.arange(k)).all():
            raise ShapeError(
                f"known targets must be classes 0 to {k - 1}; got {np.unique(targets)[:5]}: number the classes"
            )
        return np.asarray(np.eye(k)[targets.astype(np.int64)])


#: The residual of the missing record has to exceed its own rounding error by this factor.
_MARGIN = 100.0


@dataclass(frozen=True)
class GLMReconstruction:
    """The missing record.

    `error` is an estimate of the largest error of an input, and no bound: `condition` times the largest of the gradient
    that the solver may have left, the gradient's rounding error, and a target gap that contradicts both.
    """

    inputs: Array  # `(d,)`, without the constant
    target: float  # classes are numbers 0 to k-1
    residual: float  # `|target - prediction|` of the released model at the record
    condition: float  # largest error of the inputs per unit of the released model's gradient
    error: float | None  # None where nothing is known of the solver
    target_gap: float | None  # from the computed to the nearest admissible target; None where all are admissible
    notes: tuple[str, ...] = ()  # warnings for the reader


def check_known(inputs: Array, targets: Array, n_inputs: int) -> tuple[Array, Array]:
    """The known records in double precision; ShapeError if they are not finite, `(n, d)` and `(n,)`."""
    inputs, targets = np.asarray(inputs, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    if inputs.ndim != 2 or inputs.shape[1] != n_inputs or targets.shape != inputs.shape[:1]:
        raise ShapeError(
            f"known records must be inputs (n, {n_inputs}) and targets (n,); got {inputs.shape} and {targets.shape}: "
            "flatten images first"
        )
    if not (np.isfinite(inputs).all() and np.isfinite(targets).all()):
        raise ShapeError("known records must be finite; got NaN or infinity among inputs or targets")
    return inputs, targets


def check_residual(residual: float, rounding: float) -> None:
    """Raise UnsupportedModelError for a residual within its rounding error: the record has left no trace."""
    if not residual > _MARGIN * rounding:
        raise UnsupportedModelError(
            f"the attack needs a residual at the missing record; got {residual:.2g} where rounding leaves "
            f"{rounding:.2g}: the released model interpolates the record (more coefficients than records without "
            "regularization, or a saturated prediction), or the known records are not all others"
        )
