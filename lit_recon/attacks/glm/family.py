"""Families of generalized linear models: how the expected target depends on the linear predictor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from lit_recon.errors import ShapeError, UnsupportedModelError

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


#: The target's residual has to exceed what rounding alone leaves of it by this factor.
_MARGIN = 100.0


@dataclass(frozen=True)
class GLMReconstruction:
    """The missing record.

    Attributes:
        inputs: `(d,)`, without the constant.
        target: of the record; classes as positions 0 to k-1.
        residual: size of the released model's residual at the record: `|target - prediction|`.
        condition: by how much the inputs are wrong, at most, per unit of the released model's gradient.
        error: upper estimate of the largest error of an input: `condition` times the gradient that the solver may have
            left, or that rounding leaves if that is more; where the target gap shows more, `condition` times the gap;
            None where nothing is known of the solver.
        target_gap: distance from the computed target to the nearest admissible one (of `k` classes: to the nearest
            one-hot vector), which an exact reconstruction leaves at 0; None where all numbers are admissible.
        notes: what the reader has to know.
    """

    inputs: Array
    target: float
    residual: float
    condition: float
    error: float | None
    target_gap: float | None
    notes: tuple[str, ...] = ()


def check_known(inputs: Array, targets: Array, n_inputs: int) -> tuple[Array, Array]:
    """The known records in double precision, `(n, d)` and `(n,)`.

    Raises:
        ShapeError: if they do not fit each other or the model, or are not finite.
    """
    inputs, targets = np.asarray(inputs, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    if inputs.ndim != 2 or inputs.shape[1] != n_inputs or targets.shape != inputs.shape[:1]:
        raise ShapeError(
            f"known records must be inputs (n, {n_inputs}) and targets (n,); got {inputs.shape} and {targets.shape}: "
            "flatten images first"
        )
    if not (np.isfinite(inputs).all() and np.isfinite(targets).all()):
        raise ShapeError("known records must be finite; got NaN or infinity among inputs or targets")
    return inputs, targets


def contradiction(target_gap: float, allowed: float) -> tuple[str, ...]:
    """What to say of a computed target that no record can have had, if the error estimate does not explain it."""
    if target_gap <= allowed:
        return ()
    note = (
        f"the computed target is {target_gap:.2g} away from any admissible one, where the error estimate allows "
        f"{allowed:.2g}: the solver stopped earlier than its tolerance says, or records or penalties are not the "
        "model's"
    )
    return (note,)


def check_residual(residual: float, rounding: float) -> None:
    """Refuse a residual that is nothing but rounding: such a model passes through the record and holds no trace of it.

    Raises:
        UnsupportedModelError: if it is.
    """
    if not residual > _MARGIN * rounding:
        raise UnsupportedModelError(
            f"the attack needs a residual at the missing record; got {residual:.2g} where rounding leaves "
            f"{rounding:.2g}: the released model interpolates the record (more coefficients than records without "
            "regularization, or a saturated prediction), or the known records are not all others"
        )
