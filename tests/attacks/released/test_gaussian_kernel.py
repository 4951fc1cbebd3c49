"""Blocks of the kernel matrix, wherever they come from, are those of the whole matrix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.spatial.distance import cdist
from torch import Tensor

from lit_recon.attacks.released import gaussian_kernel
from lit_recon.attacks.released.base import silently
from lit_recon.attacks.released.gaussian_kernel import GaussianKernel, unit_length
from lit_recon.errors import ShapeError

K, P = 53, 30
ADVANCE = silently(0, "", "")


@pytest.fixture
def differences() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(K, P, generator=generator) * torch.logspace(-6, 2, K)[:, None]


def entries(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances between directions, in float64 throughout."""
    a, b = (rows.double() / rows.double().norm(dim=1, keepdim=True) for rows in (a, b))
    return torch.from_numpy(cdist(a, b, "sqeuclidean"))


@pytest.mark.parametrize("block", [1, 10, 53, 100])
@pytest.mark.parametrize("kept", [0, 4, 10_000])
def test_blocks_are_those_of_the_whole_matrix(differences: Tensor, block: int, kept: int) -> None:
    kernel = GaussianKernel(differences, block, kept)
    held = kernel.spread(0.7, True, ADVANCE)
    distances = entries(differences, differences)
    assert kernel.scale == pytest.approx(0.7 * float(distances.mean()), rel=1e-6)
    for rows, part in zip(held, kernel.parts, strict=True):
        torch.testing.assert_close(torch.cat(rows, dim=1), distances[part, : part.stop], rtol=0, atol=1e-6)
    expected = (-distances / kernel.scale).exp()
    values = torch.randn(K, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(2):  # the second time from products that were kept
        torch.testing.assert_close(kernel.times(values), expected @ values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("block", [8, 100])
def test_other_models_have_entries_with_all(differences: Tensor, block: int) -> None:
    kernel = GaussianKernel(differences, block)
    kernel.scale = 0.5
    others = differences[:20] + 1e-2
    expected = (-entries(others, differences) / 0.5).exp()
    torch.testing.assert_close(kernel.between(others), expected, rtol=0, atol=1e-6)


def test_products_are_kept_up_to_their_number(differences: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    products: Callable[[Tensor, Tensor], Tensor] = gaussian_kernel._products

    def counted(a: Tensor, b: Tensor) -> Tensor:
        made.append((len(a), len(b)))
        return products(a, b)

    monkeypatch.setattr(gaussian_kernel, "_products", counted)
    kernel = GaussianKernel(differences, 20, kept=4)  # 3 parts, 6 blocks
    kernel.spread(1.0, False, ADVANCE)
    assert made == [(20, 20), (20, 20), (20, 20), (13, 20), (13, 20), (13, 13)]
    kernel.times(torch.zeros(K, 1, dtype=torch.float64))
    assert made[6:] == [(13, 20), (13, 13)]


def test_rows_have_unit_length_however_many_are_scaled_at_a_time(
    differences: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = unit_length(differences)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole.double().norm(dim=1), torch.ones(K).double(), rtol=0, atol=1e-6)
    monkeypatch.setattr(gaussian_kernel, "CHUNK", 3 * P)
    assert torch.equal(unit_length(differences), whole)
    differences[-1, 0] = torch.nan
    with pytest.raises(ShapeError, match="finite and not zero"):
        unit_length(differences)
