"""Reconstruction from a linear regression without intercept, given the missing record's target.

Without a constant input the gradient `v` over the known records gives the missing inputs up to their scale,
`x = alpha v`. The scale solves `alpha^2 v.theta - alpha y + 1 = 0`; with the record's prediction `p = x.theta` its
roots are `1/(y - p)`, the true one, and `1/p`, which gives `x (y - p) / p`.

Source: Balle, Cherubin and Hayes 2022, Reconstructing training data with informed adversaries, theorem 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lit_recon.attacks.glm.family import Array, GLMReconstruction, check_known, check_residual
from lit_recon.errors import ShapeError


@dataclass(frozen=True)
class TwoCandidates:
    """Both solutions.

    Attributes:
        candidates: the one with the smaller residual, which is more often right, first.
        right: position of the only one within the range of the inputs; None if there is no such one.
    """

    candidates: tuple[GLMReconstruction, GLMReconstruction]
    right: int | None

    @property
    def best(self) -> GLMReconstruction:
        """The right candidate if it is known, else the one with the smaller residual."""
        return self.candidates[self.right or 0]


@dataclass(frozen=True)
class ReleasedWithoutIntercept:
    """A model that minimizes `1/2 sum_i (x_i theta - y_i)^2 + 1/2 penalty |theta|^2`.

    Args:
        coefficients: `(d,)`.
        penalty: at least 0.
        gradient_error: upper bound on the entries of the sum's gradient at the coefficients, 0 for a direct solver and
            None if not known.
        notes: copied to every reconstruction.

    Raises:
        ShapeError: the coefficients are no vector.
    """

    coefficients: Array
    penalty: float = 0.0
    gradient_error: float | None = 0.0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.coefficients.ndim != 1 or not len(self.coefficients):
            raise ShapeError(f"coefficients must be (d,); got {self.coefficients.shape}")

    def reconstruct(
        self,
        known_inputs: Array,
        known_targets: Array,
        target: float,
        bounds: tuple[float, float] | None = None,
    ) -> TwoCandidates:
        """Both records that could have been used together with the known ones.

        Args:
            known_inputs: `(n, d)`, all records but one.
            known_targets: `(n,)`.
            target: of the missing record.
            bounds: smallest and largest possible value of an input, for example 0 and 1 for pixels; a candidate that
                exceeds them by more than its error is wrong.

        Raises:
            ShapeError: the records do not fit the model.
            UnsupportedModelError: the model interpolates the missing record.
        """
        inputs, targets = check_known(known_inputs, known_targets, len(self.coefficients))
        direction = inputs.T @ (inputs @ self.coefficients - targets) + self.penalty * self.coefficients
        sizes = np.abs(inputs)
        rounding = np.finfo(np.float64).eps * (
            sizes.T @ (sizes @ np.abs(self.coefficients) + np.abs(targets)) + self.penalty * np.abs(self.coefficients)
        )
        # The direction is inputs times residual: it vanishes with either.
        check_residual(float(np.abs(direction).max()), float(rounding.max()))
        error = None if self.gradient_error is None else max(self.gradient_error, float(rounding.max()))
        product = float(direction @ self.coefficients)
        # Rounding can make the discriminant, the square of y - 2p, slightly negative.
        root = math.sqrt(max(0.0, target**2 - 4 * product))
        larger = (target + math.copysign(root, target)) / 2
        residuals = sorted((larger, product / larger if larger else 0.0), key=abs)
        first, second = (self._candidate(direction, residual, root, target, error) for residual in residuals)
        return TwoCandidates((first, second), None if bounds is None else _only_one_within(bounds, first, second))

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


def _only_one_within(bounds: tuple[float, float], first: GLMReconstruction, second: GLMReconstruction) -> int | None:
    """Position of the candidate whose inputs stay within the bounds, if the other's do not."""
    low, high = bounds
    within = [
        bool(np.all((found.inputs >= low - slack) & (found.inputs <= high + slack)))
        for found in (first, second)
        for slack in [max(found.error or 0.0, 1e-6 * (high - low))]
    ]
    return within.index(True) if sum(within) == 1 else None
