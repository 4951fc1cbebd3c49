"""The subspace that the features of a batch span, read off the layer's own weight gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Between the last direction of the features and the first of rounding, eigenvalues of single-precision gradients fall
#: by many orders of magnitude; by less, and it is noise.
GAP = 30.0


class Span(NamedTuple):
    """Orthonormal `basis` `(d, r)`, and `gap`: last eigenvalue inside over first outside."""

    basis: Tensor
    gap: float


def weight_span(gradient: Tensor, n_examples: int) -> Span:
    """Row space of a weight gradient `(m, d)`, whose rows are combinations of the examples' features.

    Its dimension is `n_examples`, unless an eigenvalue gap before that says that features coincide or vanish.
    Exact up to rounding where features are linearly independent; noise of standard deviation s relative to the
    gradient's root mean square turns it by about `s sqrt(n / m)`.

    Args:
        gradient: of the layer's weights, without missing entries.
        n_examples: at most `d`.

    >>> features = torch.eye(8, dtype=torch.float64)[:3]
    >>> weight_span(torch.rand(20, 3, dtype=torch.float64) @ features, n_examples=3).basis.shape
    torch.Size([8, 3])
    """
    values, vectors = torch.linalg.eigh(gradient.T @ gradient)
    values = values.flip(0).clamp_min(torch.finfo(values.dtype).eps * values[-1].clamp_min(1e-300))
    following = torch.cat([values[1:], values[-1:]])
    falls = values / following
    size = n_examples
    if n_examples < len(values) and falls[n_examples - 1] < GAP:
        # no gap where it should be: an earlier one, down to the rounding floor, says that the rank is smaller
        earlier = int(falls[:n_examples].argmax()) + 1
        if falls[earlier - 1] > 1e4 and values[earlier] < 1e-9 * values[0]:
            size = earlier
    return Span(vectors.flip(1)[:, :size].contiguous(), float(falls[size - 1]))
