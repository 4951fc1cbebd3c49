from __future__ import annotations

import numpy as np
import pytest
import torch

from lit_recon.errors import ShapeError
from lit_recon.metrics.baselines import NearestNeighborOracle


def test_distances_are_those_of_all_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.rand(7, 3, 4, 5, generator=generator)
    images = torch.randint(256, (5_001, 3, 4, 5), generator=generator).to(torch.uint8)
    oracle = NearestNeighborOracle.measure(targets, images)
    pairs = targets[:, None].double().numpy() - images[None].double().numpy() / 255
    distances = (pairs**2).mean((2, 3, 4))
    np.testing.assert_allclose(oracle.nearest.numpy(), distances.min(1), rtol=1e-6)
    for percent in (1, 10, 50):
        assert oracle.percentiles[percent] == pytest.approx(np.percentile(distances, percent, axis=1).mean(), rel=1e-6)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ShapeError, match="in bytes; got"):
        NearestNeighborOracle.measure(torch.zeros(1, 1, 2, 2), torch.zeros(3, 1, 2, 2))
    with pytest.raises(ShapeError, match="in bytes; got"):
        NearestNeighborOracle.measure(torch.zeros(1, 1, 2, 2), torch.zeros(0, 1, 2, 2, dtype=torch.uint8))
