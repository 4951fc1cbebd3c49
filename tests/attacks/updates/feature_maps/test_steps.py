"""The single steps of the recovery, each against something computed in another way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_recon.attacks.updates.feature_maps.convolutions import (
    Convolution,
    PatchProjection,
    covers_everything,
    patch_span,
)
from lit_recon.attacks.updates.feature_maps.recovery import separate
from lit_recon.solving import leading_eigenspace


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("differences", [False, True])
def test_the_projection_is_one(stride: int, differences: bool) -> None:
    layer = nn.Conv2d(3, 40, 3, stride=stride, padding=1, bias=False).double()
    maps = torch.randn(2, 3, 4, 4, generator=generator(), dtype=torch.float64)
    places = (4 // stride) ** 2
    asked = Convolution("layer", (3, 4, 4), 40, (3, 3), (stride, stride), (1, 1), places, True)
    patches = nn.functional.unfold(maps[:1], 3, padding=1, stride=stride)[0].T
    if differences:
        patches = patches - patches.mean(0)
    cotangents = torch.randn(40, places, generator=generator(1), dtype=torch.float64)
    span = patch_span((cotangents @ patches).view_as(layer.weight), places)
    assert span.differences == differences
    projection = PatchProjection(asked, span)
    dense = projection(torch.eye(48, dtype=torch.float64))
    torch.testing.assert_close(dense, dense.T)
    values = torch.linalg.eigvalsh(dense)
    assert float(values.min()) > -1e-12
    assert float(values.max()) < 1 + 1e-12
    if not differences:
        factor = projection.dense()
        torch.testing.assert_close(factor.T @ factor, dense)
    # the map that the patches are of is left alone
    counts = nn.functional.fold(torch.ones(1, 27, places, dtype=torch.float64), (4, 4), 3, padding=1, stride=stride)
    vector = (maps[:1] * counts.sqrt()).flatten(1)
    torch.testing.assert_close(projection(vector), vector)
    torch.testing.assert_close(projection.maps(vector), maps[:1])


def test_kernels_may_miss_entries() -> None:
    assert covers_everything(Convolution("a", (1, 8, 8), 4, (3, 3), (2, 2), (1, 1), 16, True))
    assert not covers_everything(Convolution("a", (1, 8, 8), 4, (1, 1), (2, 2), (0, 0), 16, True))


def test_eigenspace_against_a_dense_solver() -> None:
    basis = torch.linalg.qr(torch.randn(200, 200, generator=generator(), dtype=torch.float64))[0]
    values = torch.cat([torch.ones(5), 1 - torch.linspace(0.03, 1, 195)]).double()
    matrix = basis * values @ basis.T
    found = leading_eigenspace(lambda rows: rows @ matrix, 200, 6, depth=12)
    torch.testing.assert_close(found.values[:5], torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(found.values[5], values[5], rtol=0, atol=1e-6)
    outside = found.vectors[:5] - found.vectors[:5] @ basis[:, :5] @ basis[:, :5].T
    assert float(outside.norm()) < 1e-6
    torch.testing.assert_close(found.vectors @ found.vectors.T, torch.eye(6, dtype=torch.float64))


def test_eigenvectors_that_are_not_asked_for_need_not_converge() -> None:
    basis = torch.linalg.qr(torch.randn(300, 300, generator=generator(), dtype=torch.float64))[0]
    values = torch.cat([torch.ones(3), 0.9 - torch.linspace(0, 0.9, 297)]).double()
    matrix, counts = basis * values @ basis.T, []
    for exact in (None, 3):
        applied: list[int] = []

        def apply(rows: torch.Tensor, applied: list[int] = applied) -> torch.Tensor:
            applied.append(len(rows))
            return rows @ matrix

        found = leading_eigenspace(apply, 300, 4, exact, depth=8, restarts=20)
        torch.testing.assert_close(found.values, values[:4], rtol=0, atol=1e-3)
        outside = found.vectors[:3] - found.vectors[:3] @ basis[:, :3] @ basis[:, :3].T
        assert float(outside.norm()) < 1e-8
        counts.append(sum(applied))
    assert counts[1] < 0.7 * counts[0]


@pytest.mark.parametrize(
    ("start", "least", "steps"),
    [(0.9, 0.99, 2), (0.9, 0.8, None), (1.0, 0.9999, None)],
)
def test_eigenvalues_that_are_too_small_are_not_refined(start: float, least: float, steps: int | None) -> None:
    basis = torch.linalg.qr(torch.randn(300, 300, generator=generator(), dtype=torch.float64))[0]
    # three values, and a dense spectrum a little below where the search might stop too early
    values = torch.cat([torch.full((3,), start), start - 1e-3 - torch.linspace(0, start - 1e-3, 297)]).double()
    matrix, applied = basis * values @ basis.T, []

    def apply(rows: torch.Tensor) -> torch.Tensor:
        applied.append(len(rows))
        return rows @ matrix

    found = leading_eigenspace(apply, 300, 4, 3, least, depth=8, restarts=60)
    if steps is not None:
        assert len(applied) == 8 * steps
    else:
        torch.testing.assert_close(found.values[:3], values[:3], rtol=0, atol=1e-9)
    assert values[3] - found.residuals[3] - 1e-9 <= found.values[3] <= values[3] + 1e-9


@pytest.mark.parametrize("n", [1, 3, 6])
def test_sparse_maps_are_told_apart(n: int) -> None:
    maps = torch.relu(torch.randn(n, 4000, generator=generator(), dtype=torch.float64))
    mixed = torch.randn(n, n, generator=generator(1), dtype=torch.float64) @ maps
    found = separate(torch.linalg.qr(mixed.T)[0])
    assert found is not None
    cosines = nn.functional.normalize(maps, dim=1) @ found.maps.T
    torch.testing.assert_close(cosines.max(dim=1).values, torch.ones(n, dtype=torch.float64))
    assert sorted(cosines.argmax(dim=1).tolist()) == list(range(n))
    assert found.negative < 1e-9


def test_maps_without_zeros_are_not_told_apart() -> None:
    maps = torch.rand(3, 4000, generator=generator(), dtype=torch.float64) + 0.1
    assert separate(torch.linalg.qr(maps.T)[0], tolerance=1e-6) is None
