"""Guards, and values at the edge of their range."""

from __future__ import annotations

import pytest
import torch

from lit_recon.attacks.released.gaussian_kernel import squared_distances, unit_length
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.released.networks.training import Standardization
from lit_recon.errors import ShapeError


def test_a_view_of_the_same_rows_has_distance_zero_to_them() -> None:
    rows = unit_length(torch.randn(40, 300, generator=torch.Generator().manual_seed(0)))
    assert squared_distances(rows, rows.clone()).diagonal().any()  # rounding, which the two below do not have
    for other in (rows, rows[:]):
        distances = squared_distances(rows, other)
        assert not distances.diagonal().any()
        assert torch.equal(distances, distances.T)


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 4), (5,)])
def test_standardization_needs_a_table_of_models(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="two or more different models"):
        Standardization.fitted(torch.rand(shape, generator=torch.Generator().manual_seed(0)))


def test_uncertainty_is_a_variance_despite_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    differences = torch.randn(60, 12, generator=generator)
    images, labels = torch.rand(60, 1, 3, 3, generator=generator), torch.randint(3, (60,), generator=generator)
    fitted = KernelRidge(ridges=[1e-17]).fitted(differences, images, labels, 3)
    uncertainty = fitted.reconstruct(differences * torch.logspace(-3, 3, 60)[:, None]).uncertainty
    assert (uncertainty == 0).any()  # the others are rounding too
    assert uncertainty.min() >= 0
