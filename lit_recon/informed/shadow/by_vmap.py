"""Shadow models of any architecture side by side, by `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from lit_recon.defenses.clipping import clipped_examples
from lit_recon.informed.shadow.batches import Batches, gathered
from lit_recon.informed.shadow.descent import Descent
from lit_recon.informed.shadow.private import add_noise
from lit_recon.informed.shadow.training import KnownTraining, unflatten
from lit_recon.records import Update

#: Bytes of the gradients of single images at a time.
_PIECE_BYTES = 64 * 2**20


def train_by_vmap(
    known: KnownTraining,
    initial: Tensor,
    images: Tensor,
    labels: Tensor,
    generators: Sequence[torch.Generator] | None = None,
    chunk: int = 32,
) -> Tensor:
    """Train one model per image on the fixed set and that image, `chunk` models at a time.

    Arguments, result and errors as for `train_by_loop`.
    """
    known.check(initial, images, labels, generators)
    descent, network, n = known.descent, known.network, len(known.images)
    mechanism = None if descent.dp is None else descent.dp.mechanism(known.n_steps)

    def loss(weights: Tensor, image: Tensor, label: Tensor) -> Tensor:
        parameters = unflatten(network, weights)
        fixed = F.cross_entropy(functional_call(network, parameters, known.images), known.labels, reduction="sum")
        own = F.cross_entropy(functional_call(network, parameters, image[None]), label[None])
        return (fixed + own) / (n + 1)

    gradient = vmap(grad(loss))
    batches, kept, trained = Batches(known, generators), known.kept_steps, []
    for start in range(0, len(images), chunk):
        members = slice(start, start + chunk)
        own, own_labels = images[members], labels[members]
        weights = initial.expand(len(images), -1)[members].clone()
        optimizer, released = Descent(descent, [weights]), []
        for step, numbers in enumerate(batches.of(members), start=1):
            if numbers is not None:
                optimizer.step([_of_batch(known, weights, own, own_labels, numbers)], scale=1 / numbers.shape[-1])
            elif mechanism is None:
                optimizer.step([gradient(weights, own, own_labels)])
            else:
                total = clipped_sums(network, weights, known.images, known.labels, mechanism.bound)
                total += _own_clipped(network, weights, own, own_labels, mechanism.bound)
                add_noise(list(unflatten(network, total).values()), mechanism, (generators or ())[members])
                optimizer.step([total], scale=1 / (n + 1))
            if step in kept:
                released.append(weights.clone())
        trained.append(torch.cat(released, dim=1))
    return torch.cat(trained)


def _of_batch(known: KnownTraining, weights: Tensor, own: Tensor, own_labels: Tensor, numbers: Tensor) -> Tensor:
    """Gradients of the loss summed over one mini-batch, `(s, p)`."""

    def loss(parameters: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(known.network, unflatten(known.network, parameters), images)
        return F.cross_entropy(logits, labels, reduction="sum")

    found: Tensor
    if numbers.dim() == 2:
        images, labels = gathered(known.images, own, numbers), gathered(known.labels, own_labels, numbers)
        found = vmap(grad(loss))(weights, images, labels)
        return found
    fixed = numbers[numbers < len(known.images)]
    found = torch.zeros_like(weights)
    if len(fixed):
        found += vmap(grad(loss), in_dims=(0, None, None))(weights, known.images[fixed], known.labels[fixed])
    if len(fixed) < len(numbers):
        found += vmap(grad(loss))(weights, own[:, None], own_labels[:, None])
    return found


def clipped_sums(network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor, bound: float) -> Tensor:
    """Sums of the clipped gradients of all images, `(s, p)`, at each of the weights `(s, p)`."""
    size = max(1, _PIECE_BYTES // (weights.numel() * weights.element_size()))
    total = torch.zeros_like(weights)

    def of_one(own: Tensor, some: Tensor, of_some: Tensor) -> Tensor:
        return _clipped_sum(network, own, some, of_some, bound)

    for piece, some_labels in zip(images.split(size), labels.split(size), strict=True):
        total += vmap(of_one, in_dims=(0, None, None))(weights, piece, some_labels)
    return total


def _own_clipped(network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor, bound: float) -> Tensor:
    def of_one(own: Tensor, image: Tensor, label: Tensor) -> Tensor:
        return _clipped_sum(network, own, image[None], label[None], bound)

    found: Tensor = vmap(of_one)(weights, images, labels)
    return found


def _clipped_sum(network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor, bound: float) -> Tensor:
    def loss(parameters: Update, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, parameters, image[None]), label[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(unflatten(network, weights), images, labels)
    return torch.cat([value.sum(0).flatten() for value in clipped_examples(gradients, bound).values()])
