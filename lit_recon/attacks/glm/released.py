"""Exact reconstruction of the one unknown record of a generalized linear model with intercept.

At the released coefficients `theta` the gradient over all records is zero. With all records known but one, the gradient
over the known ones is therefore minus that of the missing one: its residuals `r` (prediction minus target, one for each
linear predictor) times its inputs, a matrix of rank one whose column for the constant input is `r`. With `G` the
gradient over the known records, penalty included, in the case of one predictor:

    x = G / G_1,   y = mean(x theta) + G_1.

Source: [Balle2022], theorem 1, corrected: the paper's formula for `y` has a product in place of the sum, its penalty
`lambda |theta|^2` has to read `lambda / 2 |theta|^2`, and it regularizes the intercept, which most software does not.
Extended here to k classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lit_recon.attacks.glm.family import Array, Family, GLMReconstruction, check_known, check_residual
from lit_recon.errors import ShapeError


@dataclass(frozen=True)
class ReleasedGLM:
    """A model that minimizes `sum_i [b(t_i) - y_i t_i] + 1/2 sum penalties * theta^2`; ShapeError for other shapes.

    Args:
        family: of the target.
        coefficients: `(d+1,)`, the intercept first; for k classes `(k, d+1)`.
        penalties: of the same shape, each at least 0; that of an intercept is 0 if it is not regularized.
        gradient_error: estimate of the largest entry of the sum's gradient at the coefficients, 0 for a direct solver
            and None if not known.
        notes: copied to every reconstruction.
        dual: whether a ridge regression was solved for a number per record if it has more inputs than records.
    """

    family: Family
    coefficients: Array
    penalties: Array
    gradient_error: float | None = 0.0
    notes: tuple[str, ...] = ()
    dual: bool = False

    def __post_init__(self) -> None:
        shape = self.coefficients.shape
        fits = len(shape) == 2 and shape[0] > 1 if self.family.is_multinomial else len(shape) == 1
        if not fits or shape[-1] < 2 or self.penalties.shape != shape:
            expected = "(k, d+1), the intercepts' column" if self.family.is_multinomial else "(d+1,), the intercept's"
            raise ShapeError(
                f"coefficients and penalties must be {expected} first; got {shape} and {self.penalties.shape}"
            )

    def reconstruct(self, known_inputs: Array, known_targets: Array) -> GLMReconstruction:
        """The record that was used together with the known ones, which are all others.

        Known inputs are `(n, d)`, without the constant, and targets `(n,)`; classes are numbers 0 to k-1. ShapeError
        for records that do not fit the model, UnsupportedModelError if it interpolates the missing record.

        >>> from lit_recon.attacks.glm.family import Gaussian
        >>> line = ReleasedGLM(Gaussian(), np.array([1 / 3, 1.5]), np.zeros(2))
        >>> found = line.reconstruct(np.array([[0.0], [1.0]]), np.array([0.0, 2.5]))
        >>> np.round(found.inputs, 9), round(found.target, 9)
        (array([2.]), 3.0)
        """
        theta = np.atleast_2d(self.coefficients)
        inputs, targets = check_known(known_inputs, known_targets, theta.shape[1] - 1)
        targets = self.family.encoded(targets, len(theta))
        constant = np.column_stack([np.ones(len(inputs)), inputs])
        predictors = constant @ theta.T
        gradient = (self.family.mean(predictors) - targets).T @ constant + self.penalties * theta
        rounding = self._rounding(constant, targets, predictors)
        residuals = gradient[:, 0]
        size = float(np.linalg.norm(residuals))
        check_residual(size, float(rounding[:, 0].max()))

        found = gradient[:, 1:].T @ (residuals / size) / size
        at_record = theta[:, 0] + theta[:, 1:] @ found
        target = self.family.mean(at_record) + residuals
        nearest = self.family.nearest(target)
        gap = float(np.abs(target - nearest).max())
        # Entries of a gradient within e each move the inputs by e times the 1-norm of the residuals over their square.
        condition = (1 + float(np.abs(found).max())) * float(np.abs(residuals).sum()) / size**2
        error, notes = None, self.notes
        if self.gradient_error is not None:
            left = max(self.gradient_error, float(rounding.max()))
            error = condition * left
            allowed = left + self.family.steepness(at_record) * float(np.abs(theta[:, 1:]).sum(1).max()) * error
            if gap > allowed:
                error = condition * gap
                note = (
                    f"the computed target is {gap:.2g} away from any admissible one, where the error estimate allows "
                    f"{allowed:.2g}: the solver stopped earlier than its tolerance says, or records or penalties are "
                    "not the model's"
                )
                notes = (*notes, note)
        return GLMReconstruction(
            inputs=found,
            target=float(nearest.argmax() if self.family.is_multinomial else target[0]),
            residual=size,
            condition=condition,
            error=error,
            target_gap=None if self.family.admits_all else gap,
            notes=notes,
        )

    def _rounding(self, constant: Array, targets: Array, predictors: Array) -> Array:
        """Estimate of the rounding error of the gradient's entries, also within a direct solver, `(k, d+1)`."""
        sizes, magnitudes = np.abs(constant), np.abs(np.atleast_2d(self.coefficients))
        if self.dual:
            penalty = float(self.penalties[-1])
            magnitudes[:, 1:] = _dual_terms(magnitudes[:, 1:], sizes[:, 1:], predictors - targets, penalty)
        residuals = self.family.slope(predictors) * (sizes @ magnitudes.T) + np.abs(targets)
        return np.asarray(np.finfo(np.float64).eps * (residuals.T @ sizes + self.penalties * magnitudes))


@dataclass(frozen=True)
class TwoCandidates:
    """Both records that fit a model without intercept; that with the smaller residual is more often right."""

    candidates: tuple[GLMReconstruction, GLMReconstruction]  # the one with the smaller residual first
    right: int | None  # position of the only one within the range of the inputs, if there is one and errors are known

    @property
    def best(self) -> GLMReconstruction:
        """The right candidate if it is known, else the one with the smaller residual."""
        return self.candidates[self.right or 0]

    @property
    def other(self) -> GLMReconstruction:
        """The candidate that is not `best`."""
        return self.candidates[1 - (self.right or 0)]


@dataclass(frozen=True)
class ReleasedWithoutIntercept:
    """A model that minimizes `1/2 sum_i (x_i theta - y_i)^2 + 1/2 penalty |theta|^2`.

    Args:
        coefficients: `(d,)`, else ShapeError.
        penalty: at least 0.
        gradient_error, notes, dual: as for `ReleasedGLM`.
    """

    coefficients: Array
    penalty: float = 0.0
    gradient_error: float | None = 0.0
    notes: tuple[str, ...] = ()
    dual: bool = False

    def __post_init__(self) -> None:
        if self.coefficients.ndim != 1 or not len(self.coefficients):
            raise ShapeError(f"coefficients must be (d,); got {self.coefficients.shape}")

    def reconstruct(
        self, known_inputs: Array, known_targets: Array, target: float, bounds: tuple[float, float] | None = None
    ) -> TwoCandidates:
        """Both records that could have been used together with the known ones; see `ReleasedGLM.reconstruct`.

        The target is that of the missing record. A candidate that exceeds the `bounds` of an input, its smallest and
        largest possible value, by more than its error is wrong; without an error estimate, `right` is None.
        """
        inputs, targets = check_known(known_inputs, known_targets, len(self.coefficients))
        theta, sizes = self.coefficients, np.abs(inputs)
        residuals = inputs @ theta - targets
        direction = inputs.T @ residuals + self.penalty * theta
        magnitudes = np.abs(theta)
        if self.dual:
            magnitudes = _dual_terms(magnitudes, sizes, residuals, self.penalty)
        magnitude = sizes.T @ (sizes @ magnitudes + np.abs(targets)) + self.penalty * magnitudes
        rounding = float(np.finfo(np.float64).eps * magnitude.max())
        # The direction is inputs times residual: it vanishes with either.
        check_residual(float(np.abs(direction).max()), rounding)
        error = None if self.gradient_error is None else max(self.gradient_error, rounding)
        product = float(direction @ theta)
        # Rounding can make the discriminant, the square of y - 2p, slightly negative.
        root = math.sqrt(max(0.0, target**2 - 4 * product))
        larger = (target + math.copysign(root, target)) / 2
        roots = sorted((larger, product / larger if larger else 0.0), key=abs)
        first, second = (self._candidate(direction, residual, root, target, error) for residual in roots)
        within = [bounds is not None and _is_within(found, *bounds) for found in (first, second)]
        return TwoCandidates((first, second), within.index(True) if sum(within) == 1 else None)

    def _candidate(
        self, direction: Array, residual: float, root: float, target: float, error: float | None
    ) -> GLMReconstruction:
        """The candidate whose residual is one of the two numbers of product `v.theta` and sum `y`."""
        check_residual(abs(residual), np.finfo(np.float64).eps * abs(target))
        found = direction / residual
        # A change of v.theta by e changes the residual by e over the root of the discriminant.
        slope = float(np.abs(self.coefficients).sum()) / root if root else math.inf
        condition = (1 + float(np.abs(found).max()) * slope) / abs(residual)
        return GLMReconstruction(
            inputs=found,
            target=target,
            residual=abs(residual),
            condition=condition,
            error=None if error is None else condition * error,
            target_gap=None,
            notes=self.notes,
        )


def _dual_terms(magnitudes: Array, sizes: Array, residuals: Array, penalty: float) -> Array:
    """Sizes of the terms that coefficients of these `magnitudes` are sums of, for known records of `sizes` `(n, d)`.

    A solver of the dual problem adds up the records, each times its residual over the penalty, where there are more
    inputs than records: the terms can be far larger than their sum.
    """
    n, d = sizes.shape
    return np.asarray((np.abs(residuals) / penalty).T @ sizes) if penalty and n + 1 < d else magnitudes


def _is_within(found: GLMReconstruction, low: float, high: float) -> bool:
    """Whether a candidate may lie within the range: always, where its error is unknown."""
    if found.error is None:
        return True
    slack = max(found.error, 1e-6 * (high - low))
    return bool(np.all((found.inputs >= low - slack) & (found.inputs <= high + slack)))
