"""From the span of a batch's maps to the single maps: behind a ReLU, entries where only one of them is not zero.

Rows of a basis `(N, n)` of the span are `R^T m_j` with the values `m_j >= 0` of the n maps at entry j. Where a single
map is active the row points along one of the rows of R, and all such rows of one map are parallel: n directions that
occur again and again, among others that occur once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: Rows shorter than this, relative to the longest, are rounding.
_SHORT = 1e-3
#: Entries of a map below this many times the depth of its lowest are taken for zeros.
_MOVED = 2.0
#: Rows that are compared with all others.
_CANDIDATES = 3000
#: Rows that have to be parallel to count as the trace of one map.
_ENOUGH = 4


class Separated(NamedTuple):
    """Maps `(n, N)` of unit norm, the share of their norm below zero, and how many rows showed the rarest one alone."""

    maps: Tensor
    negative: float
    support: int


def separate(basis: Tensor, tolerance: float = 1e-4, seed: int = 0) -> Separated | None:
    """Non-negative maps, up to order and scale, from a basis `(N, n)` of their span; None if they cannot be told apart.

    Args:
        basis: orthonormal columns.
        tolerance: sine of the angle below which two rows are parallel.
        seed: of the rows that are compared with all others.

    >>> maps = torch.tensor([[1.0, 0, 2, 3, 0, 1, 0, 5, 3], [0, 1.0, 2, 0, 3, 0, 2, 1, 4]], dtype=torch.float64)
    >>> found = separate(torch.linalg.qr(maps.T)[0], seed=1)
    >>> sorted((found.maps / found.maps.amax(1, keepdim=True) > 1e-9).sum(1).tolist())
    [6, 6]
    """
    n = basis.shape[1]
    norms = basis.norm(dim=1)
    long = norms > _SHORT * norms.max()
    rows = basis[long] / norms[long, None]
    generator = torch.Generator().manual_seed(seed)
    candidates = rows[torch.randperm(len(rows), generator=generator)[:_CANDIDATES]]
    counts = torch.cat([_parallel(part, rows, tolerance) for part in candidates.split(500)])
    directions: list[Tensor] = []
    support: list[int] = []
    for i in counts.argsort(descending=True, stable=True).tolist():
        if len(directions) == n or counts[i] < min(_ENOUGH, 1 + len(rows) // (4 * n)):
            break
        if all(float(_sine(candidates[i], other)) > 10 * tolerance for other in directions):
            directions.append(candidates[i])
            support.append(int(counts[i]))
    if len(directions) < n:
        return None
    rays = torch.stack(directions)
    if torch.linalg.svdvals(rays)[-1] < 1e-6:
        return None
    maps = torch.linalg.solve(rays.T, basis.T)
    for _ in range(2):
        maps = torch.stack([_sharpened(basis, one) for one in maps])
    return Separated(maps, float(maps.clamp_max(0).norm(dim=1).max()), min(support))


def _sharpened(basis: Tensor, one: Tensor) -> Tensor:
    """The map in the span that vanishes best where this one nearly does: thousands of rows instead of a few rays."""
    # nothing is below zero, so that what is tells how far rounding and noise have moved the zeros
    vanishing = basis[one <= _MOVED * float(-one.min())]
    if len(vanishing) < 4 * basis.shape[1]:
        return torch.nn.functional.normalize(one, dim=0)
    _, vectors = torch.linalg.eigh(vanishing.T @ vanishing)
    sharper = basis @ vectors[:, 0]
    return torch.nn.functional.normalize(sharper * torch.sign(sharper @ one), dim=0)


def _parallel(candidates: Tensor, rows: Tensor, tolerance: float) -> Tensor:
    """How many rows point the same way as each candidate; all of unit norm."""
    # 1 - cos = sin^2 / 2 for small angles
    least = 1 - tolerance**2 / 2 - 4 * torch.finfo(rows.dtype).eps
    return (candidates @ rows.T > least).sum(dim=1)


def _sine(one: Tensor, other: Tensor) -> Tensor:
    sine: Tensor = (one - (one @ other) * other).norm()
    return sine


class Eigenspace(NamedTuple):
    """Largest eigenvalues `(k,)`, falling, with eigenvectors as orthonormal rows `(k, d)`."""

    values: Tensor
    vectors: Tensor


def leading_eigenspace(
    apply: Callable[[Tensor], Tensor],
    size: int,
    k: int,
    depth: int = 30,
    restarts: int = 6,
    tolerance: float = 1e-10,
    seed: int = 0,
) -> Eigenspace:
    """The `k` largest eigenvalues of a positive semidefinite operator.

    Args:
        apply: the operator on rows `(b, d)`.
        size: `d`.
        k: how many.
        depth: applications between two Rayleigh-Ritz steps; `depth * (k + 2)` rows are held.
        restarts: Rayleigh-Ritz steps at most.
        tolerance: residual norm of the eigenvectors at which to stop.
        seed: of the first block.

    >>> values = torch.tensor([3.0, 3.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    >>> leading_eigenspace(lambda rows: rows * values, 5, 2).values.round(decimals=6)
    tensor([3., 3.], dtype=torch.float64)
    """
    width = min(k + 2, size)
    generator = torch.Generator().manual_seed(seed)
    block = _orthonormal(torch.randn(width, size, generator=generator, dtype=torch.float64))
    for _ in range(restarts):
        basis, images = block, apply(block)
        newest = images
        for _ in range(depth - 1):
            newest = newest[: size - len(basis)]  # nothing is left behind the whole space
            if len(newest) == 0:
                break
            for _ in range(2):  # once leaves what rounding puts back
                newest = newest - (newest @ basis.T) @ basis
            newest = _orthonormal(newest)
            basis = torch.cat([basis, newest])
            newest = apply(newest)
            images = torch.cat([images, newest])
        values, weights = torch.linalg.eigh((basis @ images.T + images @ basis.T) / 2)
        values, weights = values.flip(0)[:width], weights.flip(1)[:, :width]
        block, moved = weights.T @ basis, weights.T @ images
        residual = (moved - values[:, None] * block)[:k].norm(dim=1).max()
        if float(residual) < tolerance:
            break
        block = _orthonormal(block)
    return Eigenspace(values[:k], block[:k])


def _orthonormal(rows: Tensor) -> Tensor:
    columns: Tensor = torch.linalg.qr(rows.T)[0]
    return columns.T.contiguous()
