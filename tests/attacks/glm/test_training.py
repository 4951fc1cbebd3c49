from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from lit_recon.attacks.glm.family import Array
from lit_recon.attacks.glm.training import Counts, LeastSquares, Logistic, Regression, attack_record
from lit_recon.errors import ConfigError, ShapeError


@cache
def _digits() -> tuple[Array, Array]:
    from sklearn.datasets import load_digits

    levels, labels = load_digits(return_X_y=True)
    return levels[:400] / 16, labels[:400].astype(np.float64)


def _worst(regression: Regression, odd: bool = False) -> float:
    """The largest error of a pixel over a few records."""
    images, labels = _digits()
    targets = labels % 2 if odd else labels
    fitted = regression.fit(images, targets)
    errors = []
    for missing in (0, 17, 301):
        known = np.arange(len(images)) != missing
        attempt = attack_record(fitted.released, images[known], targets[known], targets[missing])
        assert attempt.found is not None
        assert attempt.found.target == pytest.approx(targets[missing], abs=1e-6)
        errors.append(float(np.abs(attempt.found.inputs - images[missing]).max()))
    return max(errors)


@pytest.mark.parametrize(
    ("regression", "odd"),
    [
        (LeastSquares(), False),
        (LeastSquares(penalty=0.5), False),
        (LeastSquares(intercept=False), False),
        (LeastSquares(penalty=0.5, intercept=False), False),
        (Logistic(C=1.0), True),
        (Logistic(C=1.0, solver="newton-cg"), False),
        (Counts(alpha=0.01), False),
    ],
    ids=repr,
)
def test_tightly_solved_models_give_their_records_away(regression: Regression, odd: bool) -> None:
    assert _worst(regression, odd) < 1e-6  # measured at most 1e-9
    assert regression.classifies == isinstance(regression, Logistic)


def test_a_solver_that_gives_up_says_so() -> None:
    images, labels = _digits()
    fitted = Logistic(solver="lbfgs", tol=1e-4, max_iter=3).fit(images, labels)
    assert any(note.startswith("scikit-learn warned: lbfgs failed to converge") for note in fitted.notes)
    attempt = attack_record(fitted.released, images[1:], labels[1:])
    assert attempt.found is not None
    assert attempt.found.error is None
    assert "max_iter=3" in " ".join(attempt.found.notes)


def test_scores_are_those_of_the_estimator() -> None:
    images, labels = _digits()
    fitted = Logistic(C=0.1, solver="lbfgs", tol=1e-3).fit(images, labels)
    assert fitted.score(images, labels) == np.mean(fitted.estimator.predict(images) == labels)


def test_an_interpolating_model_is_refused() -> None:
    images, labels = _digits()
    released = LeastSquares().fit(images[:40], labels[:40]).released
    attempt = attack_record(released, images[1:40], labels[1:40])
    assert attempt.found is None
    assert "interpolates" in attempt.refusal
    fallback = images[1:40].mean(axis=0)
    assert attempt.image(fallback, (0.0, 1.0)) is fallback


def test_two_roots_are_both_returned_and_images_stay_in_range() -> None:
    images, labels = _digits()
    released = LeastSquares(intercept=False).fit(images, labels).released
    attempt = attack_record(released, images[1:], labels[1:], labels[0])
    assert attempt.found is not None
    assert attempt.other is not None
    # The digit is a 0, for which the roots are the image and its negative.
    np.testing.assert_allclose(attempt.other.inputs, -images[0], atol=1e-9)
    assert attempt.told
    shown = attempt.image(images[1], (0.0, 0.5))
    assert shown.max() == 0.5
    with pytest.raises(ShapeError, match="pass target"):
        attack_record(released, images[1:], labels[1:])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: LeastSquares(penalty=-1),
        lambda: Logistic(C=0),
        lambda: Logistic(tol=0),
        lambda: Counts(alpha=-1),
        lambda: Counts(max_iter=0),
    ],
)
def test_settings_out_of_range_are_refused(wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(ConfigError, match="must be"):
        wrong()
