"""Guards of the recovery of maps, on systems small enough to know the answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_recon.attacks.updates.feature_maps.convolutions import Convolution
from lit_recon.attacks.updates.feature_maps.equations import _factor
from lit_recon.attacks.updates.feature_maps.recovery import _sharpened, leading_eigenspace


@pytest.mark.parametrize(("size", "determined"), [(1e-5, True), (1e-8, False)])
def test_an_entry_that_hardly_enters_the_equations_is_not_determined(size: float, determined: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    columns = torch.linalg.qr(torch.randn(60, 4, generator=generator, dtype=torch.float64))[0]
    system = columns * torch.tensor([1.0, 1.0, 1.0, size])
    factor = _factor(system, 0.0)
    assert (factor is not None) == determined
    if factor is not None:
        torch.testing.assert_close(factor @ factor.T, system.T @ system)


def test_an_exhausted_space_is_not_filled_with_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(40, 3, generator=generator, dtype=torch.float64))[0].T
    seen: list[int] = []

    def apply(rows: Tensor) -> Tensor:
        seen.append(len(rows))
        return (rows @ axes.T * torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)) @ axes

    values, vectors = leading_eigenspace(apply, 40, 3)
    torch.testing.assert_close(values, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close((vectors @ axes.T).abs(), torch.eye(3, dtype=torch.float64), rtol=0.0, atol=1e-9)
    # five random rows and the three directions of the range that they miss span all that the operator reaches
    assert sum(seen) <= 10


@pytest.mark.parametrize(("entries", "sharpened"), [(400, True), (10, False)])
def test_a_map_is_sharpened_where_enough_of_it_vanishes(entries: int, sharpened: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    maps = torch.nn.functional.normalize(torch.randn(2, entries, generator=generator, dtype=torch.float64).relu())
    one = torch.nn.functional.normalize(maps[0] - 0.02 * maps[1], dim=0)
    found = _sharpened(torch.linalg.qr(maps.T).Q, one)
    # with 10 entries at most 8 vanish, and the map comes back as it was
    expected = maps[0] if sharpened else one
    # measured 1.4e-4 from the true map; unsharpened 3e-3
    torch.testing.assert_close(found, expected, rtol=0.0, atol=5e-4)


def test_patches_overlap_only_in_both_directions() -> None:
    def overlaps(kernel: tuple[int, int], stride: tuple[int, int]) -> bool:
        return Convolution("layer", (1, 9, 9), 4, kernel, stride, (0, 0), 9, sparse=True).overlaps

    assert overlaps((3, 3), (1, 2))
    assert [overlaps((3, 3), (1, 3)), overlaps((3, 3), (3, 1)), overlaps((1, 3), (1, 1))] == [False] * 3
