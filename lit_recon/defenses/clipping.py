"""The rule that bounds a gradient: shrink it to a given L2 norm, leave shorter ones alone.

Formal guarantees, for finite gradients: the norm of the result is at most the bound (up to rounding); shapes and dtypes
stay; a gradient within the bound comes back bit for bit.

| bound | result |
|---|---|
| 0 | zero |
| infinite | the gradient itself |
| negative | refused by the defenses |
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.defenses.vectors import root, squared_norm
from lit_recon.records import Update


def clipped(update: Update, bound: float) -> Update:
    """The update, scaled as a whole to an L2 norm of at most `bound`.

    >>> clipped({"weight": torch.tensor([3.0, 4.0])}, bound=1.0)
    {'weight': tensor([0.6000, 0.8000])}
    """
    factor = clip_factors(squared_norm(update), bound)
    return {name: value * factor for name, value in update.items()}


def clipped_examples(gradients: Update, bound: float) -> Update:
    """Gradients `(n, ...)` of single examples, each scaled as a whole to an L2 norm of at most `bound`."""
    squared = torch.stack([value.flatten(1).square().sum(1) for value in gradients.values()]).sum(0)
    factors = clip_factors(squared, bound)
    return {name: value * factors.view(-1, *[1] * (value.dim() - 1)) for name, value in gradients.items()}


def clip_factors(squared: Tensor, bound: float) -> Tensor:
    """What gradients of these squared norms are multiplied with, elementwise; at most 1.

    >>> clip_factors(torch.tensor([0.25, 16.0]), bound=1.0)
    tensor([1.0000, 0.2500])
    """
    norm = root(squared)
    return torch.where(norm > bound, bound / norm, 1.0)
