"""Equal utility by bisection."""

from __future__ import annotations

import pytest

from lit_recon.defenses import matched_scale
from lit_recon.errors import ConfigError


@pytest.mark.parametrize("sign", [1, -1])
def test_finds_the_crossing_of_a_monotone_utility(sign: int) -> None:
    found = matched_scale(lambda scale: sign * scale**3, sign * 0.027, 1e-3, 1e3, steps=40)
    assert found == pytest.approx(0.3, rel=1e-6)


def test_refuses_what_cannot_be_reached() -> None:
    with pytest.raises(ConfigError, match="nearest is 2"):
        matched_scale(lambda scale: scale, 5.0, 1.0, 2.0)
    with pytest.raises(ConfigError, match="nearest is 1"):
        matched_scale(lambda scale: scale, 0.5, 1.0, 2.0)
    with pytest.raises(ConfigError, match="0 < low < high"):
        matched_scale(lambda scale: scale, 0.5, 0.0, 2.0)
