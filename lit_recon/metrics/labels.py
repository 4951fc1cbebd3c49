"""Label accuracy: the labels of a batch that an attack recovered."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.measures import MEASURES
from lit_recon.metrics.registry import Metric, register


def label_hits(recovered: Tensor, true: Tensor) -> Tensor:
    """Which true labels are among the recovered ones, as multisets: order does not count, multiplicity does.

    Of a class that was recovered k times, the first k of its true labels count as recovered.

    Args:
        recovered: `(n,)` integer classes, in any order.
        true: `(n,)` integer classes.

    Returns:
        `(n,)` float64, 1 or 0; the mean is the label accuracy.

    Raises:
        ShapeError: if the two are not label vectors of equal length.

    >>> label_hits(torch.tensor([0, 1, 0, 5]), torch.tensor([0, 0, 1, 1])).tolist()
    [1.0, 1.0, 1.0, 0.0]
    """
    for name, labels in (("recovered", recovered), ("true", true)):
        if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ShapeError(
                f"{name} labels must be integer classes (n,); got {labels.dtype} of shape {tuple(labels.shape)}"
            )
    if len(recovered) != len(true):
        raise ShapeError(f"one label per image is needed; got {len(recovered)} recovered and {len(true)} true labels")
    found = (recovered == true[:, None]).sum(dim=1)
    earlier = (true == true[:, None]).tril(diagonal=-1).sum(dim=1)
    return (earlier < found).double()


@register
class LabelAccuracy(Metric):
    """Share of the labels that were recovered, batch by batch as multisets; see `label_hits`."""

    measure = MEASURES["label_accuracy"]
    of = "labels"

    def __call__(self, found: Tensor, truth: Tensor) -> Tensor:
        return label_hits(found, truth)
