from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax

from lit_recon.attacks.glm.family import Array, Multinomial
from lit_recon.attacks.glm.released import ReleasedGLM
from lit_recon.errors import ShapeError, UnsupportedModelError

N, D, K = 50, 3, 4


def _records(seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(N, D))
    noise = rng.gumbel(size=(N, K))
    return inputs, (inputs @ rng.normal(size=(D, K)) + noise).argmax(1).astype(np.float64)


def _fit(inputs: Array, targets: Array, penalties: Array) -> Array:
    """The minimizer by Newton's method on all coefficients as one vector, pseudo-inverse for the free common shift."""
    constant = np.column_stack([np.ones(len(inputs)), inputs])
    one_hot = np.eye(K)[targets.astype(int)]
    theta = np.zeros((K, D + 1))
    for _ in range(30):
        p = softmax(constant @ theta.T, axis=1)
        gradient = (p - one_hot).T @ constant + penalties * theta
        weights = p[:, :, None] * np.eye(K) - p[:, :, None] * p[:, None, :]
        curvature = np.einsum("nkl,ni,nj->kilj", weights, constant, constant).reshape(theta.size, theta.size)
        theta = theta - (np.linalg.pinv(curvature + np.diag(penalties.ravel())) @ gradient.ravel()).reshape(theta.shape)
    return theta


def _penalties(mu: float, intercept: float) -> Array:
    return np.column_stack([np.full(K, intercept), np.full((K, D), mu)])


@pytest.mark.parametrize("penalties", [_penalties(1, 0), _penalties(0.5, 0.5)], ids=["free", "regularized"])
@pytest.mark.parametrize("missing", [0, 11, 49])
def test_inputs_and_class_come_back(penalties: Array, missing: int) -> None:
    inputs, targets = _records(missing)
    others = np.arange(N) != missing
    found = ReleasedGLM(Multinomial(), _fit(inputs, targets, penalties), penalties).reconstruct(
        inputs[others], targets[others]
    )
    assert np.abs(found.inputs - inputs[missing]).max() < 1e-9
    assert found.target == targets[missing]
    assert found.target_gap is not None
    assert found.target_gap < 1e-9
    assert found.error is not None
    assert found.error < 1e-8
    assert found.notes == ()


def test_penalties_of_another_model_are_noticed() -> None:
    inputs, targets = _records(1)
    theta = _fit(inputs, targets, _penalties(1, 0))
    found = ReleasedGLM(Multinomial(), theta, _penalties(2, 0)).reconstruct(inputs[1:], targets[1:])
    assert "penalties are not the model's" in found.notes[0]
    assert ReleasedGLM(Multinomial(), theta, _penalties(2, 0), None).reconstruct(inputs[1:], targets[1:]).error is None


def test_the_error_estimate_follows_the_gradient_that_was_left() -> None:
    inputs, targets = _records(2)
    penalties = _penalties(1, 1)
    theta = _fit(inputs, targets, penalties)
    moved = theta + 1e-6 * np.random.default_rng(0).normal(size=theta.shape)
    constant = np.column_stack([np.ones(N), inputs])
    one_hot = np.eye(K)[targets.astype(int)]
    left = np.abs((softmax(constant @ moved.T, axis=1) - one_hot).T @ constant + penalties * moved).max()
    found = ReleasedGLM(Multinomial(), moved, penalties, gradient_error=float(left)).reconstruct(
        inputs[1:], targets[1:]
    )
    assert found.error is not None
    assert found.error / 20 < np.abs(found.inputs - inputs[0]).max() < 1.1 * found.error


def test_a_saturated_record_is_refused() -> None:
    # Two points far apart, one per class: no residual is left at either.
    theta = np.array([[0.0, 500.0], [0.0, -500.0]])
    with pytest.raises(UnsupportedModelError, match="saturated"):
        ReleasedGLM(Multinomial(), theta, np.zeros_like(theta)).reconstruct(np.array([[1.0]]), np.array([0.0]))


def test_classes_are_numbers_from_0() -> None:
    with pytest.raises(ShapeError, match="classes 0 to 3"):
        ReleasedGLM(Multinomial(), np.ones((K, D + 1)), np.ones((K, D + 1))).reconstruct(
            np.zeros((2, D)), np.array([1.0, 4.0])
        )


def test_penalties_must_fit_the_coefficients() -> None:
    with pytest.raises(ShapeError, match="intercepts' column first"):
        ReleasedGLM(Multinomial(), np.ones((K, 3)), np.ones((K, 2)))
