"""Scores of one batch: reconstructions are assigned to targets once, then every metric compares the pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_recon.errors import ShapeError
from lit_recon.metrics.fidelity import pairwise_mse
from lit_recon.metrics.registry import Metric, check_pairs


def match(reconstructions: Tensor, targets: Tensor) -> Tensor:
    """The permutation `(n,)`, int64, with the least total MSE of `reconstructions[permutation]` and `targets`.

    Both are `(n, c, h, w)` in [0, 1]; a ShapeError for others. Source: Kuhn 1955, the Hungarian method.

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
    """Scores of a batch in the order of its targets, on the CPU.

    `per_image` is `(n,)` float64 by the key of every metric of images, `of_labels` by that of every metric of labels,
    which are recovered for the batch and not image by image. `order` `(n,)` is the permutation that
    matched the reconstructions with the targets.
    """

    order: Tensor
    reconstructions: Tensor
    recovered_labels: Tensor
    per_image: dict[str, Tensor]
    of_labels: dict[str, Tensor]


def score_pairs(images: Tensor, targets: Tensor, metrics: Sequence[Metric]) -> dict[str, Tensor]:
    """Metrics of images, `(n,)` float64 by key, of matched pairs `(n, c, h, w)` in [0, 1]; a ShapeError for others."""
    check_pairs(images, targets)
    chosen = (metric for metric in metrics if metric.of == "images")
    return {metric.measure.key: checked_values(metric, images, targets, len(targets)) for metric in chosen}


def scores_with_baselines(
    images: Tensor, mean: Tensor, nearest: Tensor, targets: Tensor, metrics: Sequence[Metric]
) -> dict[str, Tensor]:
    """Metrics `(n,)` by key of images, and with a prefix of the mean image and of the nearest public images."""
    compared = {"": images, "baseline_mean_image_": mean, "baseline_nearest_public_": nearest}
    return {
        f"{prefix}{name}": values
        for prefix, shown in compared.items()
        for name, values in score_pairs(shown, targets, metrics).items()
    }


def checked_values(metric: Metric, found: Tensor, truth: Tensor, n: int) -> Tensor:
    """The metric's values of a batch of `n` images, `(n,)` float64 on the CPU; a ShapeError for others or NaN."""
    with torch.no_grad():
        values = metric(found, truth)
    if tuple(values.shape) != (n,) or torch.isnan(values).any():
        raise ShapeError(
            f"the metric '{metric.measure.key}' must return one number per image, ({n},), and no NaN; got shape "
            f"{tuple(values.shape)}" + ", some of it NaN" * bool(torch.isnan(values).any())
        )
    return values.detach().cpu().double()


def certified_entries(certified: Tensor, errors: Tensor, name: str) -> dict[str, float | int | None]:
    """Share and number of certified images, `(n,)` bool, and the mean and the largest of their errors `(n,)`.

    >>> certified_entries(torch.tensor([True, False]), torch.tensor([0.25, 0.5]), "mse")
    {'certified_rate': 0.5, 'n_certified': 1, 'certified_mse': 0.25, 'certified_mse_max': 0.25}
    """
    there = errors[certified]
    entries: dict[str, float | int | None] = {"certified_rate": float(certified.double().mean())}
    entries["n_certified"] = len(there)
    entries[f"certified_{name}"] = float(there.mean()) if len(there) else None
    entries[f"certified_{name}_max"] = float(there.max()) if len(there) else None
    return entries


def score_batch(
    reconstructions: Tensor, targets: Tensor, recovered_labels: Tensor, labels: Tensor, metrics: Sequence[Metric]
) -> BatchScores:
    """Match reconstructions `(n, c, h, w)` in [0, 1] with the targets; score them and the labels `(n,)`.

    A ShapeError says that shapes disagree, pixels leave [0, 1], or the batch is empty.
    """
    images, truth = reconstructions.detach().cpu(), targets.detach().cpu()
    recovered, true = recovered_labels.detach().cpu(), labels.detach().cpu()
    if not len(truth) == len(true) == len(recovered) > 0:
        raise ShapeError(
            f"a batch needs at least one image, and one true and one recovered label per image; got {len(truth)} "
            f"images, {len(true)} true and {len(recovered)} recovered labels"
        )
    permutation = match(images, truth)
    matched = images[permutation]
    of_labels = (metric for metric in metrics if metric.of == "labels")
    hits = {metric.measure.key: checked_values(metric, recovered, true, len(true)) for metric in of_labels}
    return BatchScores(permutation, matched, recovered[permutation], score_pairs(matched, truth, metrics), hits)
