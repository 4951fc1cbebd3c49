"""What an unknown image does to the model that is trained on it: gradients of its loss along training.

Sources: Balle, Cherubin and Hayes 2022, Reconstructing training data with informed adversaries, appendix L (norms) and
appendix M (coordinates that are zero).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from lit_recon.data import ImageSet
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.informed.shadow.engine import Execution
from lit_recon.informed.shadow.plan import ShadowPlan
from lit_recon.informed.shadow.training import unflatten

#: Models whose gradients are computed at a time.
_CHUNK = 64


@dataclass(frozen=True, eq=False)
class TargetGradients:
    """Gradients of each model's loss on its own image, with respect to all its weights, at some steps of training.

    Attributes:
        steps: done before the gradient is taken; 0 is the initial model.
        norms: `(t, m)`.
        zeros: by parameter, the share of its coordinates that are exactly 0, mean over the models, `(t,)`.
    """

    steps: list[int]
    norms: Tensor
    zeros: Mapping[str, Tensor]


def along_training(plan: ShadowPlan, targets: ImageSet, n_steps: int, execution: Execution) -> TargetGradients:
    """Train one model per target as `plan` says, and take the gradient of the target's loss along the way.

    Args:
        plan: of the models; those that were released are trained for the purpose `released`.
        targets: own image of each model, `m` of them.
        n_steps: points along training, evenly spread; the first is the initial model, the last the trained one.
        execution: how the models are trained.

    Raises:
        ConfigError: fewer than two points.
        ShapeError: images do not fit the network, or training diverged.
    """
    if n_steps < 2:
        raise ConfigError(f"gradients along training need at least two points, its begin and its end; got {n_steps}")
    last, members, pixels = plan.known.n_steps, range(len(targets)), targets.pixels()
    steps = sorted({int(step) for step in torch.linspace(0, last, n_steps).round()})
    descent = dataclasses.replace(plan.descent, steps=last, epochs=None, snapshots=steps[1:-1])
    whole = dataclasses.replace(plan, descent=descent)
    nothing = torch.zeros(1, dtype=torch.float64)
    trained = whole.train(targets, members, execution, nothing).view(len(targets), len(steps) - 1, -1)
    paths = [plan.starts(members).expand(len(targets), -1), *trained.unbind(1)]
    norms, zeros = [], []
    for weights in paths:
        found = own_gradients(plan.network, weights, pixels, targets.labels)
        norms.append(found.norm(dim=1))
        zeros.append({name: (own == 0).double().mean() for name, own in unflatten(plan.network, found).items()})
    return TargetGradients(
        steps, torch.stack(norms), {name: torch.stack([shares[name] for shares in zeros]) for name in zeros[0]}
    )


def own_gradients(network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Gradient of every model's cross-entropy on one image, `(m, p)`.

    Args:
        network: the architecture.
        weights: `(m, p)`.
        images: one per model, `(m, c, h, w)`.
        labels: of those, `(m,)`.

    Raises:
        ShapeError: there is not one image per model.
    """
    if not len(weights) == len(images) == len(labels) or not len(weights):
        raise ShapeError(
            f"every model needs one image and one label; got {len(weights)}, {len(images)} and {len(labels)}"
        )

    def loss(own: Tensor, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, unflatten(network, own), image[None]), label[None])

    gradient = vmap(grad(loss))
    parts: Sequence[Tensor] = [
        gradient(*part) for part in zip(*(part.split(_CHUNK) for part in (weights, images, labels)), strict=True)
    ]
    return torch.cat(list(parts))
