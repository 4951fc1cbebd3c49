"""Released models as points of a plane: those that look alike to the attacker lie together.

Source: Balle, Cherubin and Hayes 2022, figure 8; van der Maaten and Hinton 2008, Visualizing data using t-SNE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_recon.errors import ShapeError

#: Neighbors that t-SNE looks at, where there are so many models.
_PERPLEXITY = 30.0
#: Fewest points that can be laid out.
FEWEST = 6


def embedded(features: Tensor, seed: int = 0) -> Tensor:
    """t-SNE by scikit-learn.

    Args:
        features: `(m, p)`, one row per model.
        seed: of the layout.

    Returns:
        Points `(m, 2)`.

    Raises:
        ShapeError: fewer than six models, or features that are not finite.
    """
    if features.dim() != 2 or len(features) < FEWEST or not torch.isfinite(features).all():
        raise ShapeError(
            f"a layout needs finite features (m, p) of at least {FEWEST} models; got {tuple(features.shape)}"
        )
    from sklearn.manifold import TSNE

    # t-SNE stops where gradients fall below a fixed size: differences of models are far too small for it as they are.
    centred = features.double() - features.double().mean(dim=0)
    scaled = centred / centred.norm(dim=1).mean().clamp(min=torch.finfo(torch.float64).tiny)
    layout = TSNE(perplexity=min(_PERPLEXITY, (len(features) - 1) / 3), init="random", random_state=seed)
    return torch.from_numpy(layout.fit_transform(scaled.numpy()))


def neighbor_agreement(points: Tensor, labels: Tensor, n_neighbors: int = 5) -> float:
    """Share of the nearest neighbors of all points that have the point's own label.

    Args:
        points: `(m, d)`, more than `n_neighbors`.
        labels: `(m,)`.
        n_neighbors: per point.

    Raises:
        ShapeError: too few points, or not one label per point.

    >>> points = torch.tensor([[0.0], [0.1], [0.2], [9.0], [9.1], [9.2]])
    >>> neighbor_agreement(points, torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    1.0
    """
    if points.dim() != 2 or labels.shape != points.shape[:1] or not 1 <= n_neighbors < len(points):
        raise ShapeError(
            f"agreement needs more than {n_neighbors} points with a label each; got {tuple(points.shape)} and "
            f"{tuple(labels.shape)}"
        )
    distances = torch.cdist(points.double(), points.double())
    distances.fill_diagonal_(torch.inf)
    nearest = distances.topk(n_neighbors, dim=1, largest=False).indices
    return float((labels[nearest] == labels[:, None]).double().mean())
