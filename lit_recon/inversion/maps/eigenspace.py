"""Leading eigenvectors of a symmetric operator by block Krylov iteration: multiplicities are what it is made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


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
