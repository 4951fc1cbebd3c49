"""Training of generalized linear models with scikit-learn, and the attack on one of their records."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from lit_recon.attacks.glm.estimators import (
    from_linear_regression,
    from_logistic_regression,
    from_poisson_regressor,
    from_ridge,
)
from lit_recon.attacks.glm.family import Array, GLMReconstruction
from lit_recon.attacks.glm.released import ReleasedGLM, ReleasedWithoutIntercept
from lit_recon.errors import ConfigError, ShapeError, UnsupportedModelError

#: A released model, as the informed adversary sees it.
Released = ReleasedGLM | ReleasedWithoutIntercept
#: Settings of regressions that are refused outside a range, and the range in words.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(("penalty", "alpha"), (lambda value: value >= 0, "at least 0")),
    **dict.fromkeys(("C", "tol"), (lambda value: value > 0, "above 0")),
    "max_iter": (lambda value: value >= 1, "at least 1"),
}


@dataclass(frozen=True)
class FittedRegression:
    """A trained model."""

    released: Released  # the published model
    estimator: Any  # scikit-learn's, which is not published
    notes: tuple[str, ...]  # scikit-learn's warnings, each once

    def score(self, inputs: Array, targets: Array) -> float:
        """Accuracy of a classifier, otherwise the share of variance or deviance explained."""
        return float(self.estimator.score(inputs, targets))


class Regression(ABC):
    """A way to train a generalized linear model; its objective is that of scikit-learn's estimator."""

    classifies: ClassVar[bool] = False  # whether targets are classes 0 to k-1

    def __post_init__(self) -> None:
        for name, (holds, rule) in _RANGES.items():
            if name in vars(self) and not holds(getattr(self, name)):
                raise ConfigError(f"{name} must be {rule}; got {self}")

    @abstractmethod
    def estimator(self) -> Any:
        """scikit-learn's estimator, not yet fitted."""

    @abstractmethod
    def release(self, estimator: Any, n_examples: int) -> Released:
        """A released model of the fitted estimator."""

    def fit(self, inputs: Array, targets: Array) -> FittedRegression:
        """Train on records with inputs `(n, d)`, without the constant, and targets `(n,)`."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            estimator = self.estimator().fit(inputs, targets)
        said = dict.fromkeys(str(warning.message).strip().splitlines()[0] for warning in caught)
        notes = tuple(f"scikit-learn warned: {line}" for line in said)
        return FittedRegression(self.release(estimator, len(targets)), estimator, notes)


@dataclass(frozen=True)
class LeastSquares(Regression):
    """Linear regression, solved directly.

    Args:
        penalty: `|X theta - y|^2 + penalty |theta|^2` is minimized; 0 is ordinary least squares, above 0 it is ridge.
        intercept: fit one, without regularization; otherwise the adversary needs the missing record's target, too.
    """

    penalty: float = 0.0
    intercept: bool = True

    def estimator(self) -> Any:
        from sklearn.linear_model import LinearRegression, Ridge

        if self.penalty:
            return Ridge(alpha=self.penalty, fit_intercept=self.intercept, solver="cholesky")
        return LinearRegression(fit_intercept=self.intercept)

    def release(self, estimator: Any, n_examples: int) -> Released:
        return from_ridge(estimator) if self.penalty else from_linear_regression(estimator)


@dataclass(frozen=True)
class Logistic(Regression):
    """Logistic regression of two classes or, multinomial, of more.

    Args:
        C: inverse of the penalty, as in scikit-learn: cross-entropy summed over records plus `|theta|^2 / (2 C)`.
        solver: of scikit-learn: `newton-cholesky` is exact, but needs a matrix of all coefficients in memory.
        tol: tolerance at which the solver stops.
        max_iter: largest number of iterations.
    """

    classifies: ClassVar[bool] = True

    C: float = 1.0
    solver: Literal["lbfgs", "newton-cg", "newton-cholesky"] = "newton-cholesky"
    tol: float = 1e-12
    max_iter: int = 200

    def estimator(self) -> Any:
        from sklearn.linear_model import LogisticRegression

        return LogisticRegression(C=self.C, solver=self.solver, tol=self.tol, max_iter=self.max_iter)

    def release(self, estimator: Any, n_examples: int) -> Released:
        return from_logistic_regression(estimator, n_examples)


@dataclass(frozen=True)
class Counts(Regression):
    """Poisson regression with logarithmic link.

    Args:
        alpha: half the mean deviance plus `alpha |theta|^2 / 2` is minimized, as in scikit-learn.
        solver, tol, max_iter: as for `Logistic`.
    """

    alpha: float = 1.0
    solver: Literal["lbfgs", "newton-cholesky"] = "newton-cholesky"
    tol: float = 1e-12
    max_iter: int = 200

    def estimator(self) -> Any:
        from sklearn.linear_model import PoissonRegressor

        return PoissonRegressor(alpha=self.alpha, solver=self.solver, tol=self.tol, max_iter=self.max_iter)

    def release(self, estimator: Any, n_examples: int) -> Released:
        return from_poisson_regressor(estimator, n_examples)


@dataclass(frozen=True)
class Attempt:
    """The result of an attack on one record."""

    found: GLMReconstruction | None  # the record, or the likelier of two candidates; None if the attack is impossible
    other: GLMReconstruction | None = None  # the second candidate for a model without intercept
    told: bool = False  # whether the range of the inputs excludes the other candidate
    refusal: str = ""  # why the attack is impossible

    def image(self, fallback: Array, bounds: tuple[float, float]) -> Array:
        """The reconstructed image `(d,)`, clipped to the bounds; the fallback if the attack is impossible."""
        return fallback if self.found is None else np.clip(self.found.inputs, *bounds)


def attack_record(
    released: Released, known_inputs: Array, known_targets: Array, target: float | None = None
) -> Attempt:
    """Reconstruct the record that a model was trained on beside the known ones, by [Balle2022], theorems 1 and 8.

    The target of the missing record is needed for a model without intercept only. Inputs are pixels in [0, 1].
    ShapeError for a missing target; for known records see `ReleasedGLM.reconstruct`.
    """
    try:
        if not isinstance(released, ReleasedWithoutIntercept):
            return Attempt(released.reconstruct(known_inputs, known_targets))
        if target is None:
            raise ShapeError("the attack on a model without intercept needs the missing record's target: pass target")
        both = released.reconstruct(known_inputs, known_targets, target, (0.0, 1.0))
    except UnsupportedModelError as error:
        return Attempt(None, refusal=str(error))
    return Attempt(both.best, both.other, both.right is not None)
