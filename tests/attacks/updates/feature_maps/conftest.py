"""Images that patches are matched to."""

from __future__ import annotations

import pytest
from torch import Tensor


@pytest.fixture
def images(photographs: Tensor) -> Tensor:
    return photographs[:2, :, ::4, ::4].contiguous()
