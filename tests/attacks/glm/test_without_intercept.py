from __future__ import annotations

import numpy as np
import pytest

from lit_recon.attacks.glm.family import Array
from lit_recon.attacks.glm.released import ReleasedWithoutIntercept
from lit_recon.errors import ShapeError, UnsupportedModelError

N, D = 80, 6


def _records(seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    inputs = rng.random((N, D))
    return inputs, inputs @ rng.normal(size=D) + rng.normal(size=N)


def _fit(inputs: Array, targets: Array, penalty: float) -> Array:
    return np.linalg.solve(inputs.T @ inputs + penalty * np.eye(D), inputs.T @ targets)


@pytest.mark.parametrize("penalty", [0.0, 2.5])
@pytest.mark.parametrize("seed", range(10))
def test_one_candidate_is_the_record_and_the_other_a_known_multiple(penalty: float, seed: int) -> None:
    inputs, targets = _records(seed)
    theta = _fit(inputs, targets, penalty)
    both = ReleasedWithoutIntercept(theta, penalty).reconstruct(inputs[1:], targets[1:], float(targets[0]))
    prediction = inputs[0] @ theta
    residual = targets[0] - prediction
    mirrored = inputs[0] * residual / prediction
    errors = [[float(np.abs(c.inputs - x).max()) for x in (inputs[0], mirrored)] for c in both.candidates]
    assert max(min(row) for row in errors) < 1e-7
    # The candidate with the smaller residual comes first: the right one where the model predicts better than by half.
    assert errors[0].index(min(errors[0])) == int(abs(residual) > abs(prediction))
    assert both.right is None
    assert both.best is both.candidates[0]
    for row, candidate in zip(errors, both.candidates, strict=True):
        assert candidate.error is not None
        assert min(row) < candidate.error < 1e-4


def test_the_range_of_the_inputs_tells_which() -> None:
    told = 0
    for seed in range(60):
        inputs, targets = _records(seed)
        released = ReleasedWithoutIntercept(_fit(inputs, targets, 0.0))
        both = released.reconstruct(inputs[1:], targets[1:], float(targets[0]), bounds=(0.0, 1.0))
        if both.right is not None:
            told += 1
            assert both.best.inputs == pytest.approx(inputs[0], abs=1e-6)
    assert told > 30


def test_a_model_that_interpolates_is_refused() -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(D, D)), rng.normal(size=D)
    with pytest.raises(UnsupportedModelError, match="interpolates"):
        ReleasedWithoutIntercept(np.linalg.solve(inputs, targets)).reconstruct(inputs[1:], targets[1:], targets[0])


def test_coefficients_are_a_vector() -> None:
    with pytest.raises(ShapeError, match="must be"):
        ReleasedWithoutIntercept(np.ones((2, 3)))
