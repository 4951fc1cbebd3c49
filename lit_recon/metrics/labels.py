"""How many of a batch's labels an attack recovered."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.errors import ShapeError


def label_overlap(recovered: Tensor, true: Tensor) -> int:
    """Size of the overlap of two multisets of labels: order does not count, multiplicity does.

    Args:
        recovered: `(n,)` integer classes, in any order.
        true: `(n,)` integer classes.

    Raises:
        ShapeError: if the two are not label vectors of equal length.
    """
    for name, labels in (("recovered", recovered), ("true", true)):
        if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ShapeError(
                f"{name} labels must be integer classes (n,); got {labels.dtype} of shape {tuple(labels.shape)}"
            )
    if len(recovered) != len(true):
        raise ShapeError(f"one label per image is needed; got {len(recovered)} recovered and {len(true)} true labels")
    classes = torch.unique(true)
    counts = [(labels[:, None] == classes).sum(0) for labels in (recovered, true)]
    return int(torch.minimum(*counts).sum())


def label_accuracy(recovered: Tensor, true: Tensor) -> float:
    """Share of the true labels that were recovered, as multisets: `{0, 0, 1}` for `{0, 1, 1}` scores 2/3.

    Args:
        recovered: `(n,)` integer classes, in any order.
        true: `(n,)` integer classes, n at least 1.

    Returns:
        A number in [0, 1].

    Raises:
        ShapeError: if the two are not label vectors of equal, positive length.

    >>> label_accuracy(torch.tensor([0, 1, 0, 5]), torch.tensor([0, 0, 1, 1]))
    0.75
    """
    overlap = label_overlap(recovered, true)
    if not len(true):
        raise ShapeError("label accuracy needs at least one label; got an empty batch")
    return overlap / len(true)
