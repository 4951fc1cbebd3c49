"""Models that differ by class lie apart in the plane, however small the differences."""

from __future__ import annotations

import pytest
import torch

from lit_recon.attacks.released.diagnostics import embedded, neighbor_agreement
from lit_recon.errors import ShapeError


def test_classes_stay_together_at_any_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(30) % 3
    features = 4 * torch.randn(3, 20, generator=generator)[labels] + torch.randn(30, 20, generator=generator)
    points = embedded(features)
    assert points.shape == (30, 2)
    assert neighbor_agreement(points, labels) > 0.9  # measured 1.0
    # A power of two, so that nothing is rounded: the layout is the same to the last bit.
    assert torch.equal(embedded(2.0**-17 * features), points)


def test_agreement_of_labels_that_mean_nothing_is_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    points, labels = torch.randn(400, 2, generator=generator), torch.randint(4, (400,), generator=generator)
    assert neighbor_agreement(points, labels) == pytest.approx(0.25, abs=0.05)  # five deviations


@pytest.mark.parametrize("features", [torch.randn(5, 3), torch.full((9, 3), torch.nan), torch.randn(9)])
def test_what_cannot_be_laid_out_is_refused(features: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match="at least 6 models"):
        embedded(features)


def test_agreement_needs_more_points_than_neighbors() -> None:
    with pytest.raises(ShapeError, match="more than 5 points with a label each"):
        neighbor_agreement(torch.randn(5, 2), torch.zeros(5))
