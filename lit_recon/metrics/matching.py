"""Which reconstruction belongs to which target: an update does not keep the order of its batch, so no attack can."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.metrics.fidelity import pairwise_mse
from lit_recon.metrics.images import check_pairs


def match(reconstructions: Tensor, targets: Tensor) -> Tensor:
    """The assignment of reconstructions to targets with the least total MSE; one per batch serves all scores.

    Args:
        reconstructions: `(n, c, h, w)` in [0, 1], in any order.
        targets: `(n, c, h, w)` in [0, 1].

    Returns:
        `(n,)` int64 permutation: `reconstructions[permutation[i]]` belongs to `targets[i]`.

    Raises:
        ShapeError: if the batches differ in shape or leave [0, 1].

    Source: Kuhn 1955, The Hungarian method for the assignment problem; solved by SciPy.

    >>> targets = torch.rand(3, 1, 8, 8)
    >>> match(targets[[2, 0, 1]], targets).tolist()
    [1, 2, 0]
    """
    from scipy.optimize import linear_sum_assignment

    check_pairs(reconstructions, targets)
    _, columns = linear_sum_assignment(pairwise_mse(targets, reconstructions).cpu().numpy())
    return torch.as_tensor(columns, dtype=torch.int64, device=targets.device)
