"""How one image influences a model that is trained on it: gradients along training, embedding, identification.

Source: [Balle2022], appendix L (norms of gradients), appendix M (zeros in gradients), figure 8 (embedding).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import grad

from lit_recon.attacks.shadow.engine import Execution
from lit_recon.attacks.shadow.plan import ShadowPlan
from lit_recon.attacks.shadow.training import cross_entropy, of_own_images, unflatten
from lit_recon.data import ImageSet
from lit_recon.errors import ConfigError, ShapeError

#: Models whose gradients are computed at a time.
_CHUNK = 64


@dataclass(frozen=True, eq=False)
class TargetGradients:
    """Gradients of each model's loss on its own image with respect to all weights, at some steps of training."""

    steps: list[int]  # number of steps before each gradient; 0 is the initial model
    norms: Tensor  # `(t, m)`
    zeros: Mapping[str, Tensor]  # per parameter, the models' mean share of coordinates that are exactly 0, `(t,)`


def along_training(plan: ShadowPlan, targets: ImageSet, n_steps: int, execution: Execution) -> TargetGradients:
    """Train one model per target image, with gradients at `n_steps` evenly spaced points, start and end included."""
    if n_steps < 2:
        raise ConfigError(f"gradients along training need at least two points, its start and its end; got {n_steps}")
    last, members, pixels = plan.known.n_steps, range(len(targets)), targets.pixels()
    steps = sorted({int(step) for step in torch.linspace(0, last, n_steps).round()})
    descent = dataclasses.replace(plan.descent, steps=last, epochs=None, snapshots=steps[1:-1])
    whole = dataclasses.replace(plan, descent=descent)
    nothing = torch.zeros(1, dtype=torch.float64)
    trained = whole.train(targets, members, execution, nothing).view(len(targets), len(steps) - 1, -1)
    path = torch.stack([plan.starts(members).expand(len(targets), -1), *trained.unbind(1)])
    gradients = torch.stack([own_gradients(plan.network, weights, pixels, targets.labels) for weights in path])
    parts = unflatten(plan.network, gradients)
    zeros = {name: (own == 0).double().flatten(1).mean(dim=1) for name, own in parts.items()}
    return TargetGradients(steps, gradients.norm(dim=2), zeros)


def own_gradients(network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Gradients `(m, p)` of the cross-entropy of models `(m, p)` on one image `(m, c, h, w)` and label `(m,)` each."""
    return of_own_images(grad(partial(cross_entropy, network)), weights, images, labels, _CHUNK)


#: Perplexity of t-SNE, if there are enough models.
_PERPLEXITY = 30.0
#: Fewest models for an embedding.
FEWEST = 6


def embedded(features: Tensor, seed: int = 0) -> Tensor:
    """Embedding `(m, 2)` by t-SNE of models with features `(m, p)`; ShapeError if not finite, or fewer than six."""
    if features.dim() != 2 or len(features) < FEWEST or not torch.isfinite(features).all():
        raise ShapeError(
            f"an embedding needs finite features (m, p) of at least {FEWEST} models; got {tuple(features.shape)}"
        )
    from sklearn.manifold import TSNE

    # t-SNE stops when gradients fall below a fixed size: without scaling, differences of models are far too small.
    centered = features.double() - features.double().mean(dim=0)
    scaled = centered / centered.norm(dim=1).mean().clamp(min=torch.finfo(torch.float64).tiny)
    layout = TSNE(perplexity=min(_PERPLEXITY, (len(features) - 1) / 3), init="random", random_state=seed)
    return torch.from_numpy(layout.fit_transform(scaled.numpy()))


def neighbor_agreement(points: Tensor, labels: Tensor, n_neighbors: int = 5) -> float:
    """Share of the nearest neighbors of points `(m, d)` that have the point's own label, `(m,)`.

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


def identified(observed: Tensor, expected: Tensor, n_candidates: int, generator: torch.Generator) -> Tensor:
    """Whether the attack identifies the true image among candidates, bool `(m,)`, for every released model.

    The adversary trains a model without noise on every candidate, and chooses the candidate whose model explains the
    released one best, which is the maximum likelihood estimate for isotropic noise. Candidates of model `i` are its own
    image and `n_candidates - 1` of the other models' images, drawn at random.

    `observed` and `expected` are differences `(m, p)` of the released and of the noise-free models from the reference.

    >>> identified(torch.eye(3) + 0.1, torch.eye(3), 3, torch.Generator())
    tensor([True, True, True])
    """
    m = len(observed)
    if observed.shape != expected.shape or observed.dim() != 2:
        raise ShapeError(f"models must be (m, p) both; got {tuple(observed.shape)} and {tuple(expected.shape)}")
    if not 2 <= n_candidates <= m:
        raise ConfigError(f"candidates must lie between 2 and the number of targets, {m}; got {n_candidates}")
    exact = expected.double()
    scores = observed.double() @ exact.T - exact.square().sum(1) / 2
    won = torch.empty(m, dtype=torch.bool)
    for own in range(m):
        others = torch.randperm(m - 1, generator=generator)[: n_candidates - 1]
        others += others >= own
        won[own] = scores[own, own] > scores[own, others].max()
    return won
