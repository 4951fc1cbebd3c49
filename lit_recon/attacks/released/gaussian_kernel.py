"""A Gaussian kernel between directions of differences, by square blocks of its lower triangle.

A block is made when it is needed, from float32 products of directions, so that no more than a few are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_recon.attacks.released.base import Advance
from lit_recon.attacks.shadow.engines.pixels import times_transposed
from lit_recon.errors import ShapeError

#: Entries that are scaled to unit length at a time, in float64.
CHUNK = 1 << 18


class GaussianKernel:
    """`exp(-d / scale)` for squared distances `d` between directions of differences, block by block.

    Args:
        differences: `(k, p)`, of any length; not copied.
        block: rows of a block.
        kept: number of blocks whose products stay in memory.
    """

    def __init__(self, differences: Tensor, block: int, kept: int = 0) -> None:
        self.differences, self.scale, self.block = differences, 1.0, block
        starts = range(0, len(differences), block)
        self.parts = [slice(start, min(start + block, len(differences))) for start in starts]
        self._n_kept, self._kept = kept, dict[tuple[int, int], Tensor]()

    def distances(self, i: int) -> Iterator[tuple[int, Tensor]]:
        """Squared distances, float64, of the models of part `i` to those of every part `j <= i`, with `j`."""
        left = None
        for j in range(i + 1):
            products = self._kept.get((i, j))
            if products is None:
                left = unit_length(self.differences[self.parts[i]]) if left is None else left
                right = left if i == j else unit_length(self.differences[self.parts[j]])
                products = _products(left, right)
                if len(self._kept) < self._n_kept:
                    self._kept[i, j] = products
            yield j, _distances(products, same=i == j)

    def spread(self, bandwidth: float, hold: bool, advance: Advance) -> list[list[Tensor]]:
        """Set the scale to `bandwidth` times the mean squared distance; returns the distances that are to be held."""
        held, total = [], 0.0
        for i in range(len(self.parts)):
            row = []
            for j, distances in self.distances(i):
                total += float(distances.sum()) * (1 if i == j else 2)
                if hold:
                    row.append(distances)
            held.append(row)
            advance(1)
        self.scale = bandwidth * (total / len(self.differences) ** 2)
        return held

    def blocks(self, i: int) -> Iterator[tuple[int, Tensor]]:
        """Entries of the kernel in place of the distances."""
        for j, distances in self.distances(i):
            yield j, distances.div_(-self.scale).exp_()

    def times(self, values: Tensor) -> Tensor:
        """The kernel matrix times `(k, c)` float64."""
        found = torch.zeros_like(values)
        for i, rows in enumerate(self.parts):
            for j, block in self.blocks(i):
                found[rows].addmm_(block, values[self.parts[j]])
                if i != j:
                    found[self.parts[j]].addmm_(block.T, values[rows])
        return found

    def between(self, others: Tensor) -> Tensor:
        """Entries `(m, k)` float64 between other differences `(m, p)` and all models."""
        found = torch.empty(len(others), len(self.differences), dtype=torch.float64)
        for some, entries in zip(others.split(self.block), found.split(self.block), strict=True):
            directions = unit_length(some)
            for part in self.parts:
                distances = squared_distances(directions, unit_length(self.differences[part]))
                entries[:, part] = distances.div_(-self.scale).exp_()
        return found


def unit_length(differences: Tensor) -> Tensor:
    """Rows `(s, p)` divided by their lengths, float32; ShapeError if one is zero or not finite."""
    directions = torch.empty_like(differences, dtype=torch.float32)
    n = max(1, CHUNK // max(1, differences.shape[1]))
    for rows, found in zip(differences.split(n), directions.split(n), strict=True):
        lengths = rows.double().norm(dim=1, keepdim=True)
        if not (torch.isfinite(lengths).all() and (lengths > 0).all()):
            raise ShapeError(
                "differences must be finite and not zero: a released model equals the reference, or holds NaN"
            )
        found.copy_(rows.double() / lengths)
    return directions


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Between rows of unit length `(m, p)` and `(n, p)`: `(m, n)` float64, exactly 0 between a row and itself."""
    return _distances(_products(a, b), a is b or (a.shape == b.shape and a.data_ptr() == b.data_ptr()))


def _products(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        return times_transposed(a, b)


def _distances(products: Tensor, same: bool) -> Tensor:
    """Squared distances, float64, from products of rows of unit length; `same`: of rows with themselves."""
    distances = products.double().mul_(-2).add_(2).clamp_(min=0)
    if same:
        distances.add_(distances.T.clone()).div_(2)
        distances.diagonal().zero_()
    return distances
