"""All scores of one batch: one assignment, then every figure of every matched pair."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.metrics.fidelity import mse, pairwise_mse, psnr, rmse, ssim
from lit_recon.metrics.images import check_pairs
from lit_recon.metrics.labels import label_accuracy
from lit_recon.metrics.perceptual import Lpips, Unavailable


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


@dataclass(frozen=True)
class BatchScores:
    """Scores of a batch in the order of its targets; everything lies on the CPU.

    Attributes:
        permutation: `(n,)`; reconstruction `permutation[i]` of the attack's order belongs to target `i`.
        reconstructions: `(n, c, h, w)` in [0, 1], in the order of the targets.
        recovered_labels: `(n,)`, in the order of the targets.
        label_accuracy: share of the labels recovered, as multisets.
        per_image: `mse, rmse, psnr, ssim` and, where it could be had, `lpips`: `(n,)` float64 each.
        unavailable: the reason, by name of the score that could not be had.
    """

    permutation: Tensor
    reconstructions: Tensor
    recovered_labels: Tensor
    label_accuracy: float
    per_image: dict[str, Tensor]
    unavailable: dict[str, str] = field(default_factory=dict)


def score_pairs(images: Tensor, targets: Tensor, lpips: Lpips | Unavailable) -> dict[str, Tensor]:
    """Every score of pairs that belong together already, such as a baseline and its target.

    Args:
        images: `(n, c, h, w)` in [0, 1].
        targets: the same shape; `targets[i]` is the truth of `images[i]`.
        lpips: the perceptual score; left out of the result when unavailable.

    Returns:
        `(n,)` float64 by `mse, rmse, psnr, ssim` and perhaps `lpips`.

    Raises:
        ShapeError: if the batches differ in shape or leave [0, 1].
    """
    scores = {"mse": mse, "rmse": rmse, "psnr": psnr, "ssim": ssim}
    values = {name: score(images, targets) for name, score in scores.items()}
    return values if isinstance(lpips, Unavailable) else {**values, "lpips": lpips(images, targets)}


def score_batch(
    reconstructions: Tensor, targets: Tensor, recovered_labels: Tensor, labels: Tensor, lpips: Lpips | Unavailable
) -> BatchScores:
    """Match an attack's images with the truth and score them.

    Args:
        reconstructions: `(n, c, h, w)` in [0, 1], in the attack's order.
        targets: `(n, c, h, w)` in [0, 1].
        recovered_labels: `(n,)`, in the attack's order.
        labels: `(n,)` true classes.
        lpips: the perceptual score, or why it cannot be had.

    Raises:
        ShapeError: if shapes disagree, pixels leave [0, 1], or the batch is empty.
    """
    images, truth = reconstructions.detach().cpu(), targets.detach().cpu()
    recovered, true = recovered_labels.detach().cpu(), labels.detach().cpu()
    accuracy = label_accuracy(recovered, true)
    if len(true) != len(truth):
        raise ShapeError(f"one label per image is needed; got {len(true)} labels for {len(truth)} targets")
    permutation = match(images, truth)
    matched = images[permutation]
    return BatchScores(
        permutation=permutation,
        reconstructions=matched,
        recovered_labels=recovered[permutation],
        label_accuracy=accuracy,
        per_image=score_pairs(matched, truth, lpips),
        unavailable={"lpips": lpips.reason} if isinstance(lpips, Unavailable) else {},
    )
