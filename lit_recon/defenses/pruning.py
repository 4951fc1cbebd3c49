"""Exact sparsity: which coordinates have the smallest or largest scores, ties included."""

from __future__ import annotations

import torch
from torch import Tensor


def lowest(scores: Tensor, count: int) -> Tensor:
    """Boolean mask, of the shape of `scores`, of exactly `count` coordinates with the lowest scores.

    Selection, not sorting: time linear in the number of coordinates, and no limit on it, where `torch.quantile` refuses
    more than 16 million. Of equal scores the selection algorithm takes some, always the same.

    >>> lowest(torch.tensor([0.3, 0.1, 0.2]), 2)
    tensor([False,  True,  True])
    """
    flat = scores.reshape(-1)
    few = count <= flat.numel() // 2
    # selecting the smaller side is the cheaper half of the work
    picked = flat.topk(count if few else flat.numel() - count, largest=not few, sorted=False).indices
    mask = torch.full_like(flat, not few, dtype=torch.bool)
    mask[picked] = few
    return mask.view(scores.shape)
