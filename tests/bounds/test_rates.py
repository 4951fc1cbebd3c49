from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import linregress, t

from lit_recon.bounds import RATES
from lit_recon.bounds.two_layer import log_slope
from lit_recon.errors import ConfigError


def test_slope_and_interval_are_those_of_a_regression() -> None:
    rng = np.random.default_rng(0)
    xs = np.repeat([1.0, 2.0, 5.0, 9.0], 3)
    ys = 3 * xs**-0.5 * np.exp(0.1 * rng.standard_normal(12))
    found = log_slope(list(xs), list(ys))
    expected = linregress(np.log(xs), np.log(ys))
    margin = expected.stderr * t.ppf(0.975, 10)
    assert found == pytest.approx((expected.slope, expected.slope - margin, expected.slope + margin))
    assert found.low < -0.5 < found.high
    wide = log_slope(list(xs), list(ys), confidence=0.999)
    assert wide.high - wide.low > found.high - found.low


@pytest.mark.parametrize("points", [([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 4], [1, 0, 2])])
def test_points_without_a_slope_are_refused(points: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ConfigError, match="a slope needs"):
        log_slope(*points)
    with pytest.raises(ConfigError, match="a slope needs"):
        log_slope([1, 2, 3], [1, math.inf, 2])


def test_orders_cover_the_papers_table() -> None:
    assert set(RATES) == {"none", "local_steps", "noise", "clipping", "dp_sgd", "dropout", "pruning"}
