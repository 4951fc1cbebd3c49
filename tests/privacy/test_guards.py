"""Guards, and values at the edge of their range."""

from __future__ import annotations

import pytest

from lit_recon.errors import ConfigError
from lit_recon.privacy.noisy_sgd import calibrate_noise


@pytest.mark.parametrize("rate", [-0.5, 0.0, 1.5])
def test_a_sampling_rate_that_is_none_is_called_so(rate: float) -> None:
    with pytest.raises(ConfigError, match="sampling_rate must be above 0 and at most 1"):
        calibrate_noise(1.0, 1e-5, steps=10, sampling_rate=rate)
