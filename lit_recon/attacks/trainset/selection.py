"""Choice among the candidates of several runs by what an attacker sees, without the true images.

`mean` is the public mean image `(c, h, w)`. It is subtracted before images are compared, since all are alike in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from lit_recon.errors import ConfigError, ShapeError
from lit_recon.records import Reconstruction


@dataclass(frozen=True, eq=False)
class RankedCandidates:
    """Candidates, best first.

    Attributes:
        images: `(k, c, h, w)`.
        labels: `(k,)`.
        scores: `(k,)`, descending.
        runs: `(k,)`, the position of the run that a candidate is from, of a mean the first of its runs.
    """

    images: Tensor
    labels: Tensor
    scores: Tensor
    runs: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def taken(self, indices: Tensor) -> RankedCandidates:
        """These candidates, in this order."""
        return RankedCandidates(self.images[indices], self.labels[indices], self.scores[indices], self.runs[indices])


def similarities(images: Tensor, others: Tensor) -> Tensor:
    """Normalized cross-correlation in [-1, 1], `(k, l)`, of images `(k, c, h, w)` and `(l, c, h, w)`.

    Every channel's mean is subtracted; 0 for an image of constant channels.
    """

    def directions(pixels: Tensor) -> Tensor:
        flat = (pixels - pixels.mean(dim=(2, 3), keepdim=True)).flatten(1)
        unit: Tensor = flat / flat.norm(dim=1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
        return unit

    return directions(images) @ directions(others).T


def by_residual(runs: Sequence[Reconstruction]) -> RankedCandidates:
    """All candidates, those of the run with the smallest loss first; the score is minus the run's loss."""
    pool = _pool(runs)
    losses = torch.tensor([found.loss for found in runs], dtype=pool.images.dtype, device=pool.images.device)
    return _ranked(pool, -losses[pool.runs])


def by_agreement(runs: Sequence[Reconstruction], mean: Tensor) -> RankedCandidates:
    """All candidates, by the mean over all other runs of the similarity to the nearest candidate of the same label.

    What training images determine recurs from different starts; what a start determines does not.
    """
    if len(runs) < 2:
        raise ConfigError(f"agreement is between restarts, of which it needs at least 2; got {len(runs)}")
    pool = _pool(runs)
    alike = _alike(pool, mean)
    own = torch.nn.functional.one_hot(pool.runs, len(runs)).bool()
    nearest = torch.stack([alike[:, own[:, run]].amax(dim=1) for run in range(len(runs))], dim=1)
    return _ranked(pool, nearest.masked_fill(own, 0).sum(dim=1) / (len(runs) - 1))


def by_clusters(
    runs: Sequence[Reconstruction],
    mean: Tensor,
    similarity: float = 0.8,
    min_runs: int = 2,
    representative: Literal["mean", "medoid"] = "mean",
) -> RankedCandidates:
    """One candidate for every cluster, by the number of runs in which the cluster occurs, which is the score.

    Clusters are merged while the mean similarity between them is above a threshold (average linkage); all of a cluster
    have the same label. Among equal scores, clusters of more similar candidates come first.

    Args:
        runs: at least `min_runs`.
        mean: public mean image.
        similarity: at which clusters are merged, below 1.
        min_runs: a cluster with fewer runs is left out.
        representative: the mean of a cluster's images, or the one that is most similar to the others.

    Source: [Oz2024], section 4 (there on embeddings of images).
    """
    if not -1 < similarity < 1 or not 1 <= min_runs <= len(runs):
        raise ConfigError(
            f"similarity must be in (-1, 1) and min_runs 1 to {len(runs)}, the number of runs; got {similarity:g} and "
            f"{min_runs}"
        )
    pool = _pool(runs)
    alike = _alike(pool, mean)
    if len(pool) == 1:
        clusters = torch.ones(1, dtype=torch.int64)
    else:
        # Distances between candidates of different labels are far above 2, the largest among those of one label.
        distances = squareform((1 - alike).clamp_min(0).cpu().numpy(), checks=False)
        clusters = torch.from_numpy(fcluster(linkage(distances, "average"), 1 - similarity, "distance"))
    images, order, found = [], [], []
    for cluster in clusters.unique():
        members = torch.nonzero(clusters == cluster).flatten().to(pool.runs.device)
        n_runs = len(pool.runs[members].unique())
        if n_runs < min_runs:
            continue
        within = alike[members][:, members]
        medoid = members[within.mean(dim=1).argmax()]
        images.append(pool.images[members].mean(dim=0) if representative == "mean" else pool.images[medoid])
        order.append((n_runs, float(within.mean())))
        found.append(medoid if representative == "medoid" else members[0])
    if not images:
        return pool.taken(torch.zeros(0, dtype=torch.int64))
    first = sorted(range(len(order)), key=order.__getitem__, reverse=True)
    chosen = torch.stack([found[i] for i in first])
    scores = pool.scores.new_tensor([order[i][0] for i in first])
    return RankedCandidates(torch.stack([images[i] for i in first]), pool.labels[chosen], scores, pool.runs[chosen])


#: Similarity above which two candidates show one image.
_SAME = 0.9


def distinct(ranked: RankedCandidates, mean: Tensor) -> RankedCandidates:
    """Without candidates that show the same image as a better one of the same label."""
    alike = _alike(ranked, mean) > _SAME
    kept: list[int] = []
    for i in range(len(ranked)):
        if not alike[i, kept].any():
            kept.append(i)
    return ranked.taken(torch.tensor(kept, dtype=torch.int64))


#: Similarity of candidates with different labels: below all others.
_OTHER_LABEL = -1e6


def _alike(pool: RankedCandidates, mean: Tensor) -> Tensor:
    """Similarity of all pairs `(k, k)`."""
    alike = similarities(pool.images - mean, pool.images - mean)
    return torch.where(pool.labels[:, None] == pool.labels, alike, _OTHER_LABEL)


def _pool(runs: Sequence[Reconstruction]) -> RankedCandidates:
    """The candidates of all runs, with scores of 0."""
    if not runs:
        raise ConfigError("a selection needs at least one run; got none")
    shapes = {tuple(found.images.shape[1:]) for found in runs}
    if len(shapes) > 1:
        raise ShapeError(f"candidates of different runs must have one shape; got {sorted(shapes)}")
    images = torch.cat([found.images for found in runs])
    numbers = torch.cat([torch.full_like(found.labels, run) for run, found in enumerate(runs)])
    return RankedCandidates(images, torch.cat([found.labels for found in runs]), images.new_zeros(len(images)), numbers)


def _ranked(pool: RankedCandidates, scores: Tensor) -> RankedCandidates:
    order = scores.argsort(descending=True, stable=True)
    return RankedCandidates(pool.images[order], pool.labels[order], scores[order], pool.runs[order])
