"""Exact reconstruction of the one unknown record of a generalized linear model with intercept.

The released coefficients `theta` make the gradient over all records vanish. With all records known but one, the
gradient over the known ones is minus the contribution of the missing one, a multiple of its inputs; the entry of the
constant input tells which multiple. With `G` that gradient, its penalty included:

    x = G / G_1,   y = mean(x theta) + G_1.

Source: Balle, Cherubin and Hayes 2022, Reconstructing training data with informed adversaries, theorem 1, corrected:
the paper's formula for `y` has a product where the sum belongs, its penalty `lambda |theta|^2` has to read
`lambda / 2 |theta|^2`, and it regularizes the intercept, which most software does not.

The gradient over the known records is minus that of the missing one, the product of its residuals `r` over the classes
and its inputs: a matrix of rank one, whose column for the constant input is `r`.

Source: Balle, Cherubin and Hayes 2022, Reconstructing training data with informed adversaries, theorem 1, carried over
to k classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import softmax

from lit_recon.attacks.glm.family import Array, Family, GLMReconstruction, check_known, check_residual, contradiction
from lit_recon.errors import ShapeError


@dataclass(frozen=True)
class ReleasedGLM:
    """A model of one target that minimizes `sum_i [b(t_i) - y_i t_i] + 1/2 sum_j penalties_j theta_j^2`.

    Args:
        family: of the target.
        coefficients: `(d+1,)`, the intercept first.
        penalties: `(d+1,)`, each at least 0; that of the intercept is 0 if it is not regularized.
        gradient_error: upper bound on the entries of the sum's gradient at the coefficients, 0 for a direct solver and
            None if not known.
        notes: carried over to every reconstruction.

    Raises:
        ShapeError: if coefficients and penalties do not fit.
    """

    family: Family
    coefficients: Array
    penalties: Array
    gradient_error: float | None = 0.0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.coefficients.ndim != 1 or len(self.coefficients) < 2 or self.penalties.shape != self.coefficients.shape:
            raise ShapeError(
                "coefficients and penalties must be (d+1,), the intercept's first; got "
                f"{self.coefficients.shape} and {self.penalties.shape}"
            )

    def reconstruct(self, known_inputs: Array, known_targets: Array) -> GLMReconstruction:
        """The record that was used together with the known ones.

        Args:
            known_inputs: `(n, d)`, all records but one, without the constant.
            known_targets: `(n,)`; for logistic regression 0 and 1.

        Raises:
            ShapeError: if the records do not fit the model.
            UnsupportedModelError: if the model interpolates the missing record.

        Source: theorem 1 of the paper, corrected.

        >>> from lit_recon.attacks.glm.family import Gaussian
        >>> line = ReleasedGLM(Gaussian(), np.array([1 / 3, 1.5]), np.zeros(2))
        >>> found = line.reconstruct(np.array([[0.0], [1.0]]), np.array([0.0, 2.5]))
        >>> np.round(found.inputs, 9), round(found.target, 9)
        (array([2.]), 3.0)
        """
        inputs, targets = check_known(known_inputs, known_targets, len(self.coefficients) - 1)
        if any(self.family.nearest(target) != target for target in np.unique(targets)):
            raise ShapeError(
                f"known targets must be admissible for {self.family}; got {np.unique(targets)[:5]}: number the classes"
            )
        constant = np.column_stack([np.ones(len(inputs)), inputs])
        predictor = constant @ self.coefficients
        gradient = constant.T @ (self.family.mean(predictor) - targets) + self.penalties * self.coefficients
        rounding = self._rounding(constant, targets, predictor)
        residual = float(gradient[0])
        check_residual(abs(residual), float(rounding[0]))

        found = gradient[1:] / residual
        at_record = np.array(self.coefficients[0] + found @ self.coefficients[1:])
        target = float(self.family.mean(at_record)) + residual
        gap = abs(target - self.family.nearest(target))
        condition = (1 + float(np.abs(found).max())) / abs(residual)
        error, notes = None, self.notes
        if self.gradient_error is not None:
            left = max(self.gradient_error, float(rounding.max()))
            error = condition * left
            moved = float(self.family.slope(at_record)) * float(np.abs(self.coefficients[1:]).sum()) * error
            found_out = contradiction(gap, left + moved)
            error, notes = condition * gap if found_out else error, notes + found_out
        return GLMReconstruction(
            inputs=found,
            target=target,
            residual=abs(residual),
            condition=condition,
            error=error,
            target_gap=None if self.family.nearest(0.25) == 0.25 else gap,
            notes=notes,
        )

    def _rounding(self, constant: Array, targets: Array, predictor: Array) -> Array:
        """What rounding may add to each entry of the gradient, also within a backward stable solver, `(d+1,)`."""
        sizes = np.abs(constant)
        residuals = self.family.slope(predictor) * (sizes @ np.abs(self.coefficients)) + np.abs(targets)
        penalties = self.penalties * np.abs(self.coefficients)
        return np.asarray(np.finfo(np.float64).eps * (sizes.T @ residuals + penalties))


@dataclass(frozen=True)
class ReleasedMultinomial:
    """A model that minimizes cross-entropy summed over records plus `1/2 sum penalties * theta^2`.

    Args:
        coefficients: `(k, d+1)`, the intercepts in the first column.
        penalties: `(k, d+1)`, each at least 0; those of the intercepts are 0 if they are not regularized.
        gradient_error: upper bound on the entries of the sum's gradient at the coefficients, 0 for a direct solver and
            None if not known.
        notes: carried over to every reconstruction.

    Raises:
        ShapeError: if coefficients and penalties do not fit.
    """

    coefficients: Array
    penalties: Array
    gradient_error: float | None = 0.0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shape = self.coefficients.shape
        if len(shape) != 2 or min(shape) < 2 or self.penalties.shape != shape:
            raise ShapeError(
                "coefficients and penalties must be (k, d+1), the intercepts' column first; got "
                f"{shape} and {self.penalties.shape}"
            )

    def reconstruct(self, known_inputs: Array, known_targets: Array) -> GLMReconstruction:
        """The record that was used together with the known ones.

        Args:
            known_inputs: `(n, d)`, all records but one, without the constant.
            known_targets: `(n,)`, classes 0 to k-1.

        Raises:
            ShapeError: if the records do not fit the model.
            UnsupportedModelError: if the model interpolates the missing record.
        """
        n_classes, width = self.coefficients.shape
        inputs, targets = check_known(known_inputs, known_targets, width - 1)
        if not np.isin(targets, np.arange(n_classes)).all():
            raise ShapeError(
                f"known targets must be classes 0 to {n_classes - 1}; got {np.unique(targets)[:5]}: number the classes"
            )
        constant = np.column_stack([np.ones(len(inputs)), inputs])
        one_hot = np.eye(n_classes)[targets.astype(np.int64)]
        predictions = softmax(constant @ self.coefficients.T, axis=1)
        gradient = (predictions - one_hot).T @ constant + self.penalties * self.coefficients
        rounding = self._rounding(constant, one_hot, predictions)
        residuals = gradient[:, 0]
        size = float(np.linalg.norm(residuals))
        check_residual(size, float(rounding[:, 0].max()))

        found = gradient[:, 1:].T @ residuals / size**2
        target = softmax(self.coefficients[:, 0] + self.coefficients[:, 1:] @ found) + residuals
        label = int(target.argmax())
        # Entries of a gradient within e each move the inputs by e times the 1-norm of the residuals over their square.
        condition = (1 + float(np.abs(found).max())) * float(np.abs(residuals).sum()) / size**2
        gap = float(np.abs(target - np.eye(n_classes)[label]).max())
        error, notes = None, self.notes
        if self.gradient_error is not None:
            left = max(self.gradient_error, float(rounding.max()))
            error = condition * left
            # A probability changes by at most half of what the linear predictors do.
            found_out = contradiction(gap, left + float(np.abs(self.coefficients[:, 1:]).sum(1).max()) / 2 * error)
            error, notes = condition * gap if found_out else error, notes + found_out
        return GLMReconstruction(
            inputs=found,
            target=float(label),
            residual=size,
            condition=condition,
            error=error,
            target_gap=gap,
            notes=notes,
        )

    def _rounding(self, constant: Array, one_hot: Array, predictions: Array) -> Array:
        """What rounding may add to each entry of the gradient, `(k, d+1)`."""
        sizes = np.abs(constant)
        residuals = predictions * (1 - predictions) * (sizes @ np.abs(self.coefficients).T) + one_hot
        return np.asarray(
            np.finfo(np.float64).eps * (residuals.T @ sizes + self.penalties * np.abs(self.coefficients)),
            dtype=np.float64,
        )
