"""Least squares that is the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor


def least_squares(matrix: Tensor, target: Tensor) -> Tensor:
    """The shortest `x` that minimizes `|matrix x - target|`; NaN where `matrix` or `target` is not finite.

    The default driver of `torch.linalg.lstsq` on a CPU, gelsy, takes its first pivots from memory that nobody has set:
    the last digits differ from run to run. On a GPU, which has no other driver, `matrix` must have full rank.
    """
    if not matrix.is_cuda and not (matrix.isfinite().all() and target.isfinite().all()):
        shape = torch.broadcast_shapes(matrix.shape[:-2], target.shape[:-2])
        return target.new_full((*shape, matrix.shape[-1], target.shape[-1]), torch.nan)
    driver = "gels" if matrix.is_cuda else "gelsd"
    solution: Tensor = torch.linalg.lstsq(matrix, target, driver=driver).solution
    return solution
