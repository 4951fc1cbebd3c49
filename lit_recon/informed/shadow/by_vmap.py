"""Shadow models of any architecture side by side, by `torch.func.vmap`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from lit_recon.informed.shadow.training import KnownTraining, unflatten


def train_by_vmap(known: KnownTraining, initial: Tensor, images: Tensor, labels: Tensor, chunk: int = 32) -> Tensor:
    """Train one model per image on the fixed set and that image, `chunk` models at a time.

    Arguments, result and errors as for `train_by_loop`.
    """
    known.check(initial, images, labels)
    descent, network, n = known.descent, known.network, len(known.images)

    def loss(weights: Tensor, image: Tensor, label: Tensor) -> Tensor:
        parameters = unflatten(network, weights)
        fixed = F.cross_entropy(functional_call(network, parameters, known.images), known.labels, reduction="sum")
        own = F.cross_entropy(functional_call(network, parameters, image[None]), label[None])
        return (fixed + own) / (n + 1)

    gradient = vmap(grad(loss))
    trained = []
    starts = initial.expand(len(images), -1).split(chunk)
    for weights, own, label in zip(starts, images.split(chunk), labels.split(chunk), strict=True):
        weights = weights.clone()
        velocity = torch.zeros_like(weights)
        for _ in range(descent.steps):
            velocity.mul_(descent.momentum).add_(gradient(weights, own, label))
            weights.add_(velocity, alpha=-descent.lr)
        trained.append(weights)
    return torch.cat(trained)
