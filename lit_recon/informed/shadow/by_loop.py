"""Shadow models one after the other, as anyone would train them; the measure of the faster ways."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_recon.informed.shadow.training import KnownTraining, flat_weights, unflatten


def train_by_loop(known: KnownTraining, initial: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Train one model per image on the fixed set and that image, by `torch.optim.SGD`.

    Args:
        known: the training.
        initial: weights `(p,)` of all models, or `(s, p)` of each.
        images: own image of each model, `(s, c, h, w)`.
        labels: of those, `(s,)`.

    Returns:
        Flat weights `(s, p)`.

    Raises:
        ShapeError: arguments do not fit.
    """
    known.check(initial, images, labels)
    descent, network = known.descent, copy.deepcopy(known.network)
    trained = []
    for start, image, label in zip(initial.expand(len(images), -1), images, labels, strict=True):
        network.load_state_dict(unflatten(network, start))
        optimizer = torch.optim.SGD(network.parameters(), lr=descent.lr, momentum=descent.momentum)
        inputs, targets = torch.cat([known.images, image[None]]), torch.cat([known.labels, label[None]])
        with torch.enable_grad():
            for _ in range(descent.steps):
                optimizer.zero_grad()
                F.cross_entropy(network(inputs), targets).backward()
                optimizer.step()
        trained.append(flat_weights(network))
    return torch.stack(trained) if trained else initial.new_empty(0, known.n_parameters)
