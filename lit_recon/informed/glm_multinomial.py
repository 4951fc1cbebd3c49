"""Exact reconstruction of the one unknown record of a multinomial logistic regression with intercepts.

The gradient over the known records is minus that of the missing one, the product of its residuals `r` over the classes
and its inputs: a matrix of rank one, whose column for the constant input is `r`.

Source: Balle, Cherubin and Hayes 2022, Reconstructing training data with informed adversaries, theorem 1, carried over
to k classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import softmax

from lit_recon.errors import ShapeError
from lit_recon.informed.glm_family import Array
from lit_recon.informed.glm_reconstruction import GLMReconstruction, check_known, check_residual, contradiction


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
