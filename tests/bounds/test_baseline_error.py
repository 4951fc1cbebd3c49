from __future__ import annotations

import math

import numpy as np
import pytest
from mpmath import mp
from scipy.stats import chi2

from lit_recon.bounds.baseline_error import (
    empirical_prior,
    empirical_prior_ceiling,
    finite_prior,
    gaussian_prior,
    gaussian_prior_chernoff,
    log_gamma_tail,
    uniform_ball,
)
from lit_recon.errors import ConfigError, ShapeError


def test_a_finite_prior_is_guessed_as_often_as_its_likeliest_candidate() -> None:
    assert finite_prior([0.2, 0.7, 0.1]).kappa == pytest.approx(0.7, abs=1e-15)
    assert finite_prior([1.0]).log_kappa == 0
    assert not finite_prior([1.0]).caveat


def test_a_ball_is_guessed_by_volume() -> None:
    assert uniform_ball(0.9, 784).kappa == pytest.approx(1.337e-36, rel=1e-3)
    assert uniform_ball(1.8, 784, radius=2.0).log_kappa == pytest.approx(uniform_ball(0.9, 784).log_kappa)
    assert uniform_ball(1.5, 3).kappa == 1


@pytest.mark.parametrize(
    ("t", "exact", "chernoff"), [(0.25, -253.046, -249.427), (0.5, -78.930, -75.714), (0.9, -3.862, -2.101)]
)
def test_a_gaussian_prior_takes_the_values_of_the_literature(t: float, exact: float, chernoff: float) -> None:
    eta = math.sqrt(t * 784) * 0.3
    assert gaussian_prior(eta, 0.3, 784).log_kappa == pytest.approx(exact, abs=5e-4)
    assert gaussian_prior_chernoff(eta, 0.3, 784).log_kappa == pytest.approx(chernoff, abs=5e-4)


@pytest.mark.parametrize(("eta", "dimension"), [(0.5, 1), (3.0, 5), (20.0, 784), (28.0, 784), (40.0, 784)])
def test_a_gaussian_prior_is_chi_square(eta: float, dimension: int) -> None:
    assert gaussian_prior(eta, 1.0, dimension).log_kappa == pytest.approx(chi2.logcdf(eta**2, dimension), rel=1e-10)


@pytest.mark.parametrize("dimension", [2, 200, 3072, 150_528])
@pytest.mark.parametrize("share", [1e-3, 0.1, 0.5, 0.9])
def test_the_tail_is_right_where_it_is_below_the_least_float(dimension: int, share: float) -> None:
    with mp.workdps(60):
        expected = float(mp.log(mp.gammainc(dimension / 2, 0, mp.mpf(share * dimension / 2), regularized=True)))
    assert log_gamma_tail(dimension / 2, share * dimension / 2) == pytest.approx(expected, rel=1e-9)


def test_the_chernoff_bound_is_above_the_exact_one() -> None:
    for eta in np.linspace(1, 40, 14):
        assert gaussian_prior(eta, 1.0, 784).log_kappa <= gaussian_prior_chernoff(eta, 1.0, 784).log_kappa


def test_an_empirical_prior_counts_neighbors() -> None:
    points = np.array([[0.0], [1.0], [2.0], [10.0]])
    assert empirical_prior(points, 1.0).kappa == pytest.approx(3 / 4)
    assert empirical_prior(points, 0.5).kappa == pytest.approx(1 / 4)
    assert "estimates, not certificates" in empirical_prior(points, 1.0).caveat


def test_the_true_kappa_of_samples_lies_between_its_estimate_and_its_ceiling() -> None:
    # The best center of the four corners of a square is no corner.
    corners = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    assert empirical_prior(corners, 0.75).kappa == pytest.approx(1 / 4)
    assert empirical_prior_ceiling(corners, 0.75).kappa == 1
    assert "draws one of the samples" in empirical_prior_ceiling(corners, 0.75).caveat


def test_images_are_compared_in_chunks() -> None:
    images = np.random.default_rng(0).random((700, 4, 4)).astype(np.float32)
    distances = np.linalg.norm(images.reshape(700, 1, 16) - images.reshape(1, 700, 16), axis=-1)
    assert empirical_prior(images, 1.0).kappa == pytest.approx((distances <= 1).sum(1).max() / 700)


@pytest.mark.parametrize("probabilities", [[], [0.5, 0.6], [1.5, -0.5]])
def test_what_are_no_probabilities_is_refused(probabilities: list[float]) -> None:
    with pytest.raises(ConfigError, match="sum to 1"):
        finite_prior(probabilities)


def test_thresholds_scales_and_samples_must_make_sense() -> None:
    with pytest.raises(ConfigError, match="a ball needs"):
        uniform_ball(0.0, 3)
    with pytest.raises(ConfigError, match="Gaussian prior needs"):
        gaussian_prior(1.0, -1.0, 3)
    with pytest.raises(ConfigError, match="eta must be above 0"):
        empirical_prior(np.ones((2, 2)), 0.0)
    with pytest.raises(ShapeError, match=r"\(m, d\)"):
        empirical_prior(np.ones(3), 1.0)
