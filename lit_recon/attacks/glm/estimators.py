"""Fitted estimators of scikit-learn as released models: their objective, and the accuracy of their solver.

Objectives are scaled to a sum over records plus `mu / 2 |theta|^2`. `LinearRegression` has mu = 0; `Ridge` mu = alpha;
`LogisticRegression` mu = 1 / C; `PoissonRegressor`, whose loss is a mean, mu = n alpha. None regularizes the intercept,
except the solver liblinear. Estimators do not store `sample_weight`; reconstructions of weighted fits are wrong.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_recon.attacks.glm.family import Bernoulli, Family, Gaussian, Multinomial, Poisson
from lit_recon.attacks.glm.released import ReleasedGLM, ReleasedWithoutIntercept
from lit_recon.errors import ShapeError, UnsupportedModelError

if TYPE_CHECKING:
    from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor, Ridge

#: Gradients above this give errors above it, as residuals are rarely far above 1.
_LOOSE = 1e-6
#: Solvers that stop on the largest entry of the mean loss's gradient, and an estimate of the smallest value that it
#: reaches. L-BFGS also stops where the loss changes by less than 64 float64 steps, at a gradient of about the root of
#: that: more where the loss is large or curves much, as of Poisson regression.
_GRADIENT_FLOORS = {"lbfgs": math.sqrt(64 * np.finfo(np.float64).eps), "newton-cholesky": 0.0, "newton-cg": 0.0}
#: An estimate of how far a gradient is from 0 (None: unknown), and notes on it.
_Accuracy = tuple[float | None, tuple[str, ...]]


def from_linear_regression(estimator: LinearRegression) -> ReleasedGLM | ReleasedWithoutIntercept:
    """A fitted `LinearRegression` of one target; UnsupportedModelError for others and constrained coefficients."""
    _check_one_target(estimator, "LinearRegression")
    direct = hasattr(estimator, "rank_")  # sparse inputs are solved by LSQR, which finds no rank
    return _least_squares(estimator, 0.0, (0.0, ()) if direct else _unknown("lsqr"))


def from_ridge(estimator: Ridge) -> ReleasedGLM | ReleasedWithoutIntercept:
    """A fitted `Ridge` of one target and alpha; UnsupportedModelError for others and constrained coefficients."""
    _check_one_target(estimator, "Ridge")
    if np.ndim(estimator.alpha):
        raise UnsupportedModelError("Ridge: one alpha is expected; got an array: fit one estimator per target")
    direct = estimator.solver_ in ("cholesky", "svd")
    found = _least_squares(estimator, float(estimator.alpha), (0.0, ()) if direct else _unknown(estimator.solver_))
    return replace(found, dual=estimator.solver_ == "cholesky")


def from_poisson_regressor(estimator: PoissonRegressor, n_examples: int) -> ReleasedGLM:
    """A `PoissonRegressor` fitted with intercept on `n_examples` records, else UnsupportedModelError."""
    _check_one_target(estimator, "PoissonRegressor")
    _require(estimator, "fit_intercept", [True])
    accuracy = _tolerance(estimator, estimator.n_iter_, n_examples)
    return _released(estimator, Poisson(), n_examples * float(estimator.alpha), accuracy)


def from_logistic_regression(estimator: LogisticRegression, n_examples: int) -> ReleasedGLM:
    """A `LogisticRegression` fitted on `n_examples` records, the missing one included; targets index `classes_`.

    UnsupportedModelError for other estimators, no intercept, class weights, and penalties other than L2.
    """
    _check_fitted(estimator, "LogisticRegression")
    _require(estimator, "fit_intercept", [True])
    _require(estimator, "class_weight", [None])
    _require(estimator, "l1_ratio", [None, 0])
    _require(estimator, "penalty", ["deprecated", "l2", None])
    # Earlier releases of scikit-learn can fit one model per class instead.
    _require(estimator, "multi_class", [None, "auto", "deprecated"])
    mu = 0.0 if estimator.penalty is None else 1 / float(estimator.C)
    accuracy = _tolerance(estimator, int(np.max(estimator.n_iter_)), n_examples)
    intercept_mu = mu / estimator.intercept_scaling**2 if estimator.solver == "liblinear" else 0.0
    if len(estimator.coef_) == 1:
        return _released(estimator, Bernoulli(), mu, accuracy, intercept_mu)
    _require(estimator, "solver", [*_GRADIENT_FLOORS, "sag", "saga"])
    return _released(estimator, Multinomial(), mu, accuracy)


def _least_squares(estimator: Any, mu: float, accuracy: _Accuracy) -> ReleasedGLM | ReleasedWithoutIntercept:
    _require(estimator, "positive", [False])
    if estimator.fit_intercept:
        return _released(estimator, Gaussian(), mu, accuracy)
    coefficients = np.ravel(estimator.coef_).astype(np.float64)
    return ReleasedWithoutIntercept(coefficients, mu, *_after_rounding(estimator, accuracy))


def _released(estimator: Any, family: Family, mu: float, accuracy: _Accuracy, intercept_mu: float = 0.0) -> ReleasedGLM:
    coefficients = np.column_stack([np.ravel(estimator.intercept_), np.atleast_2d(estimator.coef_)]).astype(np.float64)
    if not family.is_multinomial:
        coefficients = coefficients[0]
    penalties = np.full_like(coefficients, mu)
    penalties[..., 0] = intercept_mu
    return ReleasedGLM(family, coefficients, penalties, *_after_rounding(estimator, accuracy))


def _check_fitted(estimator: Any, expected: str) -> None:
    # Subclasses such as LogisticRegressionCV choose their penalty elsewhere.
    if type(estimator).__name__ != expected or not hasattr(estimator, "coef_"):
        raise UnsupportedModelError(f"expected a fitted {expected}; got {estimator}: fit it, or use its own function")


def _check_one_target(estimator: Any, expected: str) -> None:
    _check_fitted(estimator, expected)
    if np.ndim(estimator.coef_) > 1 and len(estimator.coef_) != 1:
        raise UnsupportedModelError(
            f"{expected}: one target is expected; got {len(estimator.coef_)}: fit one estimator per target"
        )


def _require(estimator: Any, parameter: str, allowed: list[object]) -> None:
    value = getattr(estimator, parameter, None)
    if not any(value is choice or value == choice for choice in allowed):
        raise UnsupportedModelError(
            f"{type(estimator).__name__}: the closed form holds for {parameter} in {allowed} only; got {value!r}"
        )


def _tolerance(estimator: Any, n_iterations: int, n_examples: int) -> _Accuracy:
    """Estimate of the sum's gradient after an iterative solver."""
    if n_examples < 1:
        raise ShapeError(f"n_examples must be at least 1; got {n_examples}")
    name = type(estimator).__name__
    if n_iterations >= estimator.max_iter:
        return None, (f"{name} stopped at max_iter={estimator.max_iter}: no error estimate, expect no recovery",)
    if estimator.solver not in _GRADIENT_FLOORS:
        return _unknown(estimator.solver)
    error = n_examples * max(float(estimator.tol), _GRADIENT_FLOORS[estimator.solver])
    if error <= _LOOSE:
        return error, ()
    note = (
        f"too loose for exact recovery: {name}'s solver {estimator.solver!r} with tol={estimator.tol:g} may leave a "
        f"gradient of {error:.2g}, and inputs are wrong by a multiple of that; {name} solved by 'newton-cholesky' with "
        "tol=1e-12 would give the record away"
    )
    return error, (note,)


def _unknown(solver: str) -> _Accuracy:
    return None, (f"no error estimate: solver {solver!r} does not say how small it made the gradient",)


def _after_rounding(estimator: Any, accuracy: _Accuracy) -> _Accuracy:
    """The accuracy, unknown if coefficients were rounded after the solver."""
    dtype = estimator.coef_.dtype
    if dtype == np.float64:
        return accuracy
    note = f"no error estimate: coefficients were rounded to {dtype}, which alone moves the gradient"
    return None, (*accuracy[1], note)
