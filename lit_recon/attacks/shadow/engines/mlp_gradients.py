"""Gradients of many MLPs at once, by matrix products instead of automatic differentiation.

All models see the same images, so that their first layers, stacked, form one wide matrix. Its product with the images
and that of the backpropagated gradients with the images are nearly all of the arithmetic. All else is elementwise on
`(s, neurons, n)`, or small products, block by block of the images; the models' own images are computed by the same
functions with `n` = 1. If every model has batches of its own, there is one product per model instead.

Clipping needs the norm of every image's gradient, not the gradient: in a linear layer it is the norm of the input, with
a 1 appended for the bias, times that of the gradient with respect to the output.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_recon.attacks.shadow.engines.pixels import UsedPixels, added, blocks
from lit_recon.attacks.shadow.steps import gathered
from lit_recon.defenses.clipping import clip_factors

#: Activations, in place, whose derivative is a function of their value.
ACTIVATIONS = {"elu": F.elu_, "relu": torch.relu_, "tanh": torch.tanh_, "sigmoid": torch.sigmoid_}


class OwnImages(NamedTuple):
    """One image `(s, d)` and label `(s,)` per model."""

    images: Tensor
    labels: Tensor


class SharedImages:
    """Images `(n, d)` with labels `(n,)` that all models share, prepared for products; default: all pixels densely."""

    def __init__(self, images: Tensor, labels: Tensor, n_classes: int, pixels: UsedPixels | None = None) -> None:
        self.images, self.labels = images, labels
        self.pixels = pixels or UsedPixels.all_of(images)
        self.blocks = blocks(images, self.pixels)
        self.classes = one_hot(labels, n_classes, images.dtype).T.contiguous()

    @cached_property
    def squares(self) -> Tensor:
        """Squared norms of the images, `(n,)`."""
        return self.images.square().sum(1)


class Clip(NamedTuple):
    """Clipping of single images' gradients: squared norms of the inputs, `(n,)` or `(s, 1)`, and largest norm."""

    squares: Tensor
    bound: float


class Flow(NamedTuple):
    """Gradients in the first layer's outputs, `(s, h, n)`, and summed ones of all later weights and biases."""

    first: Tensor
    later: list[Tensor]


def shared_gradients(
    weights: list[Tensor], inputs: SharedImages, own: OwnImages | None, activation: str, bound: float | None = None
) -> list[Tensor]:
    """Gradients of the loss summed over the images that all models share, and over their own ones, if any.

    Weights and gradients are `(s, o, i)` and `(s, o)` for every layer. `bound` is the largest norm of an image's
    gradient; None: no clipping.
    """
    s, neurons, d = weights[0].shape
    parts = inputs.pixels.split(weights[0].view(s * neurons, d))
    first, others = [], []
    for block in inputs.blocks:
        outputs = block.outputs(parts).view(s, neurons, -1).add_(weights[1][:, :, None])
        clip = None if bound is None else Clip(inputs.squares[block.numbers], bound)
        many = flow(outputs, weights[2:], inputs.classes[:, block.numbers], activation, clip)
        first.append(block.sums(many.first.view(s * neurons, -1)))
        others.append([many.first.sum(2), *many.later])
    gradients = [
        inputs.pixels.join(added(first), d).view(s, neurons, d),
        *(torch.stack(part).sum(0) for part in zip(*others, strict=True)),
    ]
    if own is not None:
        _add_own(gradients, weights, own, activation, bound)
    return gradients


def separate_gradients(
    weights: list[Tensor], whole: SharedImages, own: OwnImages, numbers: Tensor, activation: str
) -> list[Tensor]:
    """Gradients of the loss summed over the images of every model's batch, `numbers` `(s, b)` as in `Batches`."""
    images, labels = gathered(whole.images, own.images, numbers), gathered(whole.labels, own.labels, numbers)
    classes = one_hot(labels, weights[-1].shape[1], images.dtype).transpose(1, 2)
    outputs = torch.baddbmm(weights[1][:, :, None], weights[0], images.transpose(1, 2))
    found = flow(outputs, weights[2:], classes, activation, None)
    return [torch.bmm(found.first, images), found.first.sum(2), *found.later]


def _add_own(
    gradients: list[Tensor], weights: list[Tensor], own: OwnImages, activation: str, bound: float | None
) -> None:
    """Add the gradient of every model's own image."""
    images, n_classes = own.images, weights[-1].shape[1]
    outputs = products_with_one(weights[0], images).add_(weights[1][:, :, None])
    clip = None if bound is None else Clip(images.square().sum(1, keepdim=True), bound)
    one = flow(outputs, weights[2:], one_hot(own.labels, n_classes, images.dtype)[:, :, None], activation, clip)
    gradients[0].baddbmm_(one.first, images[:, None, :])
    for gradient, part in zip(gradients[1:], [one.first[:, :, 0], *one.later], strict=True):
        gradient.add_(part)


def flow(outputs: Tensor, later: list[Tensor], classes: Tensor, activation: str, clip: Clip | None) -> Flow:
    """Forward and backward pass from the first layer's outputs `(s, h, n)`, which are overwritten.

    `later` are weights and biases of all later layers, `classes` are one-hot, `(k, n)` or for own images `(s, k, n)`.
    """
    values = []
    for layer in range(0, len(later), 2):
        values.append(ACTIVATIONS[activation](outputs))
        outputs = torch.baddbmm(later[layer + 1][:, :, None], later[layer], values[-1])
    residual = torch.softmax(outputs, dim=1).sub_(classes)
    if clip is not None:
        residual = residual.mul_(_factors(residual, later, values, activation, clip)[:, None, :])
    gradients: list[Tensor] = []
    for layer in reversed(range(0, len(later), 2)):
        value = values.pop()
        gradients = [torch.bmm(residual, value.transpose(1, 2)), residual.sum(2), *gradients]
        residual = _derive(torch.bmm(later[layer].transpose(1, 2), residual), value, activation)
    return Flow(residual, gradients)


def _factors(residual: Tensor, later: list[Tensor], values: list[Tensor], activation: str, clip: Clip) -> Tensor:
    """Clipping factors `(s, n)` of the gradients; these are linear in the residual of the last layer."""
    total = torch.zeros_like(residual[:, 0])
    for layer in reversed(range(0, len(later), 2)):
        value = values[layer // 2]
        total += residual.square().sum(1) * (value.square().sum(1) + 1)
        residual = _derive(torch.bmm(later[layer].transpose(1, 2), residual), value.clone(), activation)
    return clip_factors(total + residual.square().sum(1) * (clip.squares + 1), clip.bound)


def products_with_one(matrices: Tensor, vectors: Tensor) -> Tensor:
    """`(s, h, 1)` of `(s, h, q)` and `(s, q)`, by row vectors: ten times as fast with MKL as by column vectors."""
    return torch.bmm(vectors[:, None, :], matrices.transpose(1, 2)).transpose(1, 2)


def one_hot(labels: Tensor, n_classes: int, dtype: torch.dtype) -> Tensor:
    """Classes `(..., k)` of labels `(...)`."""
    return F.one_hot(labels, n_classes).to(dtype)


def _derive(gradient: Tensor, value: Tensor, activation: str) -> Tensor:
    """`gradient` times the derivative at the point where the activation has `value`; both may be overwritten."""
    if activation == "elu":
        return gradient.addcmul_(gradient, value.clamp_(max=0))
    if activation == "relu":
        return gradient.mul_(value.gt_(0))
    slope = value.square_().neg_().add_(1) if activation == "tanh" else value.addcmul_(value, value, value=-1)
    return gradient.mul_(slope)
