"""Low-rank completion: the span of the features from a weight gradient of which a defense has removed entries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: A neuron is known when it shows this many times as many entries as there are examples.
_MARGIN = 2
#: Relative ridge that keeps neurons without any observed entry solvable.
_RIDGE = 1e-12
#: The search ends where the residual falls by less than this share for some sweeps, or reaches rounding.
_GAIN, _PATIENCE, _ROUNDING = 1e-3, 5, 1e-8


class Completion(NamedTuple):
    """Orthonormal `basis` `(d, r)`, `projected` rows `(m, r)`, which are `known` `(m,)`, relative `residual`."""

    basis: Tensor
    projected: Tensor
    known: Tensor
    residual: float


def complete(gradient: Tensor, observed: Tensor, rank: int, sweeps: int = 200) -> Completion:
    """Alternating least squares for `gradient = projected basis^T` on the observed entries only.

    Zeros of a pruned or dropped gradient are visible and count as missing. Two sweeps cost O(m d r^2), memory is
    O((m + d) r^2 + m d).

    Args:
        gradient: `(m, d)`; entries outside the mask are ignored.
        observed: `(m, d)` bool.
        rank: number of examples.
        sweeps: at most so many.
    """
    mask = observed.to(gradient.dtype)
    values = gradient * mask
    norm = values.norm()
    basis = torch.linalg.eigh(values.T @ values).eigenvectors[:, -rank:]
    known = mask.sum(dim=1) >= _MARGIN * rank
    if int(known.sum()) < _MARGIN * rank:
        known = mask.any(dim=1)
    rows = known.to(gradient.dtype)[:, None]
    last, patience = float("inf"), _PATIENCE
    for _ in range(sweeps):
        projected = _masked_solve(values, mask, basis)
        basis = torch.linalg.qr(_masked_solve((values * rows).T, (mask * rows).T, projected)).Q
        projected = _masked_solve(values, mask, basis)
        residual = float(((projected @ basis.T - values) * mask * rows).norm() / norm)
        patience = _PATIENCE if residual < (1 - _GAIN) * last else patience - 1
        last = residual
        if patience == 0 or residual < _ROUNDING:
            break
    return Completion(basis, projected, known, last)


def _masked_solve(values: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    """Rows x of the result minimise |mask * (values - x factor^T)| row by row."""
    r = factor.shape[1]
    grams = (mask @ (factor[:, :, None] * factor[:, None, :]).reshape(len(factor), -1)).reshape(-1, r, r)
    ridge = _RIDGE * grams.diagonal(dim1=1, dim2=2).mean().clamp_min(torch.finfo(values.dtype).tiny)
    grams.diagonal(dim1=1, dim2=2).add_(ridge)
    solution: Tensor = torch.linalg.solve(grams, (values @ factor)[:, :, None])[:, :, 0]
    return solution
