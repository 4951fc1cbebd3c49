from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit

from lit_recon.attacks.glm.family import Array, Bernoulli, Family, Gaussian, Poisson
from lit_recon.attacks.glm.released import ReleasedGLM
from lit_recon.errors import ShapeError, UnsupportedModelError

N, D = 60, 4


def _records(family: Family, seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(N, D))
    means = family.mean(0.3 + inputs @ rng.normal(scale=0.5, size=D))
    draw = {Gaussian(): lambda: rng.normal(means), Bernoulli(): lambda: rng.random(N) < means}
    return inputs, np.asarray(draw.get(family, lambda: rng.poisson(means))(), dtype=np.float64)


def _fit(family: Family, inputs: Array, targets: Array, penalties: Array) -> Array:
    """The minimizer by Newton's method, an implementation of its own."""
    constant = np.column_stack([np.ones(len(inputs)), inputs])
    theta = np.zeros(constant.shape[1])
    for _ in range(50):
        predictor = constant @ theta
        gradient = constant.T @ (family.mean(predictor) - targets) + penalties * theta
        theta = theta - np.linalg.solve(
            (constant.T * family.slope(predictor)) @ constant + np.diag(penalties), gradient
        )
    return theta


@pytest.mark.parametrize("family", [Gaussian(), Bernoulli(), Poisson()], ids=repr)
@pytest.mark.parametrize("penalties", [np.zeros(D + 1), np.array([0, 2, 2, 2, 2.0]), np.full(D + 1, 3.0)], ids=str)
@pytest.mark.parametrize("missing", [0, 17, N - 1])
def test_inputs_and_target_come_back(family: Family, penalties: Array, missing: int) -> None:
    inputs, targets = _records(family, seed=missing)
    others = np.arange(N) != missing
    released = ReleasedGLM(family, _fit(family, inputs, targets, penalties), penalties)
    found = released.reconstruct(inputs[others], targets[others])
    assert np.abs(found.inputs - inputs[missing]).max() < 1e-9
    assert abs(found.target - targets[missing]) < 1e-9
    assert found.error is not None
    assert found.error < 1e-9
    assert found.notes == ()
    assert (found.target_gap is None) == isinstance(family, Gaussian)


def test_the_penalty_counts_half_the_square_and_the_intercept_only_if_told() -> None:
    inputs, targets = _records(Bernoulli(), seed=5)
    penalties = np.r_[0.0, np.full(D, 2.0)]
    theta = _fit(Bernoulli(), inputs, targets, penalties)
    for wrong in (2 * penalties, np.full(D + 1, 2.0)):
        found = ReleasedGLM(Bernoulli(), theta, wrong).reconstruct(inputs[1:], targets[1:])
        assert np.abs(found.inputs - inputs[0]).max() > 0.1
        assert found.target_gap is not None
        assert found.target_gap > 1e-3
        assert "penalties are not the model's" in found.notes[0]


@pytest.mark.parametrize("family", [Gaussian(), Bernoulli(), Poisson()], ids=repr)
def test_families_have_the_slope_of_their_mean(family: Family) -> None:
    t = np.linspace(-3, 3, 13)
    assert family.slope(t) == pytest.approx((family.mean(t + 1e-6) - family.mean(t - 1e-6)) / 2e-6, abs=1e-8)


def test_bernoulli_is_logistic() -> None:
    inputs, targets = _records(Bernoulli(), seed=0)

    def loss(theta: Array) -> float:
        chance = expit(theta[0] + inputs @ theta[1:])
        return float(-np.log(np.where(targets == 1, chance, 1 - chance)).sum())

    penalties = np.zeros(D + 1)
    assert minimize(loss, np.zeros(D + 1)).x == pytest.approx(_fit(Bernoulli(), inputs, targets, penalties), abs=1e-3)


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-6])
def test_the_error_estimate_follows_the_gradient_that_was_left(size: float) -> None:
    inputs, targets = _records(Bernoulli(), seed=1)
    penalties = np.ones(D + 1)
    theta = _fit(Bernoulli(), inputs, targets, penalties)
    constant = np.column_stack([np.ones(N), inputs])
    curvature = (constant.T * Bernoulli().slope(constant @ theta)) @ constant + np.diag(penalties)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=D + 1)
    left = theta + np.linalg.solve(curvature, size * signs)
    found = ReleasedGLM(Bernoulli(), left, penalties, gradient_error=size).reconstruct(inputs[1:], targets[1:])
    assert found.error is not None
    assert found.error / 10 < np.abs(found.inputs - inputs[0]).max() < 1.1 * found.error
    assert found.condition == pytest.approx((1 + np.abs(found.inputs).max()) / found.residual)


def test_a_model_that_interpolates_is_refused() -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(D + 1, D)), rng.normal(size=D + 1)
    theta = np.linalg.solve(np.column_stack([np.ones(D + 1), inputs]), targets)
    with pytest.raises(UnsupportedModelError, match="interpolates the record"):
        ReleasedGLM(Gaussian(), theta, np.zeros(D + 1)).reconstruct(inputs[1:], targets[1:])


def test_nothing_known_of_the_solver_gives_no_estimate() -> None:
    inputs, targets = _records(Poisson(), seed=0)
    penalties = np.ones(D + 1)
    theta = _fit(Poisson(), inputs, targets, penalties)
    found = ReleasedGLM(Poisson(), theta, penalties, None, ("a note",)).reconstruct(inputs[1:], targets[1:])
    assert found.error is None
    assert found.notes == ("a note",)


@pytest.mark.parametrize(
    ("inputs", "targets", "complaint"),
    [
        (np.zeros((3, D + 1)), np.zeros(3), r"inputs \(n, 4\)"),
        (np.zeros((3, 2, 2)), np.zeros(3), "flatten images"),
        (np.zeros((3, D)), np.zeros(2), r"\(2,\)"),
        (np.full((3, D), np.nan), np.zeros(3), "finite"),
        (np.zeros((3, D)), np.array([1.0, 2.0, 1.0]), "number the classes"),
    ],
)
def test_records_that_do_not_fit_are_refused(inputs: Array, targets: Array, complaint: str) -> None:
    with pytest.raises(ShapeError, match=complaint):
        ReleasedGLM(Bernoulli(), np.ones(D + 1), np.zeros(D + 1)).reconstruct(inputs, targets)


def test_penalties_must_fit_the_coefficients() -> None:
    with pytest.raises(ShapeError, match="intercept's first"):
        ReleasedGLM(Gaussian(), np.ones(3), np.zeros(2))
