"""Guards, and values at the edge of their range."""

from __future__ import annotations

import pytest

from lit_recon.bounds.baseline_error import gaussian_prior, uniform_ball
from lit_recon.errors import ConfigError


@pytest.mark.parametrize("dimension", [-1, 0])
def test_a_prior_needs_a_dimension(dimension: int) -> None:
    with pytest.raises(ConfigError, match="a dimension of at least 1"):
        uniform_ball(eta=0.1, radius=1.0, dimension=dimension)
    with pytest.raises(ConfigError, match="a dimension of at least 1"):
        gaussian_prior(eta=0.1, sigma=1.0, dimension=dimension)
