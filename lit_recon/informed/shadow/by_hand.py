"""Shadow MLPs at the speed of matrix products: the fixed set meets the first layers of all models in one product.

All models see the same fixed set, so that their first layers, stacked, form one wide matrix. Its product with the
fixed images, and the product of what flows back with them, are nearly all arithmetic there is. What follows is
elementwise on `(s, neurons, n)`, or small products; the models' own images go through the same lines with `n` = 1.

Clipping needs the norm of every image's gradient, which nobody has to write out: in a linear layer it is the norm of
the input, with a 1 for the bias, times that of what flows back to the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_recon.defenses.clipping import clip_factors
from lit_recon.errors import UnsupportedModelError
from lit_recon.informed.shadow.descent import Descent
from lit_recon.informed.shadow.private import add_noise
from lit_recon.informed.shadow.products import times_transposed
from lit_recon.informed.shadow.training import KnownTraining
from lit_recon.models.released import ReleasedMLP

#: Bytes of one hidden layer of a chunk: on a CPU what passes through the cache between two products, elsewhere enough
#: work for every kernel.
_CHUNK_BYTES = {"cpu": 4 * 2**20}
_CHUNK_BYTES_ELSEWHERE = 256 * 2**20
#: Activations whose derivative follows from their value.
_ACTIVATIONS = ("elu", "relu", "tanh", "sigmoid")


class _Flow(NamedTuple):
    """What one batch of inputs gives: gradients of the loss summed over it.

    Attributes:
        first: with respect to the first layer's outputs, `(s, h, n)`.
        later: of weights `(s, o, i)` and biases `(s, o)` of all later layers.
    """

    first: Tensor
    later: list[Tensor]


def fits_by_hand(network: nn.Module) -> bool:
    """Whether `train_by_hand` can train this network."""
    return isinstance(network, ReleasedMLP) and network.activation in _ACTIVATIONS and len(network.linear_layers) > 1


def chunk_size(known: KnownTraining) -> int:
    """How many models at a time are fastest, and fit the memory: on a CPU, their hidden layers stay in the cache."""
    width = max(layer.out_features for layer in _mlp(known.network).linear_layers)
    size = _CHUNK_BYTES.get(known.images.device.type, _CHUNK_BYTES_ELSEWHERE)
    return max(1, size // (known.images.element_size() * width * len(known.images)))


@torch.no_grad()
def train_by_hand(
    known: KnownTraining,
    initial: Tensor,
    images: Tensor,
    labels: Tensor,
    generators: Sequence[torch.Generator] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Train one model per image on the fixed set and that image, `chunk` models at a time; default: `chunk_size`.

    Arguments, result and errors as for `train_by_loop`; besides:

    Raises:
        UnsupportedModelError: the network is no MLP with a hidden layer and one of the activations known here.
    """
    known.check(initial, images, labels, generators)
    _mlp(known.network)
    size = chunk or chunk_size(known)
    trained = []
    for start in range(0, len(images), size):
        members = slice(start, start + size)
        own = _Own(images[members].flatten(1), labels[members], (generators or ())[members])
        trained.append(_train_chunk(known, initial.expand(len(images), -1)[members], own))
    return torch.cat(trained)


@torch.no_grad()
def train_without(known: KnownTraining, initial: Tensor) -> Tensor:
    """The same training but for the gradient of the own image, and without noise.

    Args:
        known: the training.
        initial: weights `(p,)`.

    Returns:
        Flat weights `(p,)`.

    Raises:
        UnsupportedModelError: as for `train_by_hand`.
    """
    return _train_chunk(known, initial[None], None)[0]


class _Own(NamedTuple):
    """What the models of a chunk have for themselves: images `(s, d)`, labels `(s,)` and generators of noise."""

    images: Tensor
    labels: Tensor
    generators: Sequence[torch.Generator]


def _mlp(network: nn.Module) -> ReleasedMLP:
    if not fits_by_hand(network) or not isinstance(network, ReleasedMLP):
        raise UnsupportedModelError(
            "batching by hand needs a ReleasedMLP with a hidden layer and an activation among "
            f"{', '.join(_ACTIVATIONS)}; got {type(network).__name__}: use execution vmap or loop"
        )
    return network


def _train_chunk(known: KnownTraining, initial: Tensor, own: _Own | None) -> Tensor:
    network, descent = _mlp(known.network), known.descent
    fixed, n, s = known.images.flatten(1).contiguous(), len(known.images), len(initial)
    transposed = fixed.T.contiguous()
    sizes = [parameter.numel() for parameter in network.parameters()]
    weights = [
        part.reshape(s, *parameter.shape).clone(memory_format=torch.contiguous_format)
        for part, parameter in zip(initial.split(sizes, dim=1), network.parameters(), strict=True)
    ]
    optimizer = Descent(descent, weights)
    mechanism = None if descent.dp is None else descent.dp.mechanism(descent.steps)
    bound = None if mechanism is None else mechanism.bound
    n_classes = network.linear_layers[-1].out_features
    fixed_classes = F.one_hot(known.labels, n_classes).T.to(fixed.dtype).contiguous()
    squares = fixed.square().sum(1)
    neurons, inputs = weights[0].shape[1:]
    for _ in range(descent.steps):
        wide = times_transposed(weights[0].view(s * neurons, inputs), fixed).view(s, neurons, n)
        wide.add_(weights[1][:, :, None])
        many = _flow(wide, weights[2:], fixed_classes, network.activation, squares, bound)
        gradient = times_transposed(many.first.view(s * neurons, n), transposed).view(s, neurons, inputs)
        gradients = [gradient, many.first.sum(2), *many.later]
        if own is not None:
            _add_own(gradients, weights, own, network.activation, bound)
            if mechanism is not None:
                add_noise(gradients, mechanism, own.generators)
        optimizer.step(gradients, scale=1 / (n + 1))
    return torch.cat([weight.flatten(1) for weight in weights], dim=1)


def _add_own(gradients: list[Tensor], weights: list[Tensor], own: _Own, activation: str, bound: float | None) -> None:
    """Add to the sums of the fixed set the gradient of every model's own image."""
    images, n_classes = own.images, weights[-1].shape[1]
    classes = F.one_hot(own.labels, n_classes).to(images.dtype)[:, :, None]
    outputs = torch.baddbmm(weights[1][:, :, None], weights[0], images[:, :, None])
    one = _flow(outputs, weights[2:], classes, activation, images.square().sum(1, keepdim=True), bound)
    gradients[0].baddbmm_(one.first, images[:, None, :])
    for gradient, part in zip(gradients[1:], [one.first[:, :, 0], *one.later], strict=True):
        gradient.add_(part)


def _flow(
    outputs: Tensor, later: list[Tensor], classes: Tensor, activation: str, squares: Tensor, bound: float | None
) -> _Flow:
    """Forward from the first layer's outputs `(s, h, n)`, which are overwritten, and back to them.

    Args:
        outputs: of the first layer.
        later: weights and biases of all later layers.
        classes: one-hot, `(k, n)` or `(s, k, 1)`.
        activation: between layers.
        squares: squared norms of the inputs, `(n,)` or `(s, 1)`.
        bound: that the gradient of every input is clipped to; None to leave them as they are.
    """
    values = []
    for layer in range(0, len(later), 2):
        values.append(_activate(outputs, activation))
        outputs = torch.baddbmm(later[layer + 1][:, :, None], later[layer], values[-1])
    residual = torch.softmax(outputs, dim=1).sub_(classes)
    if bound is not None:
        residual = residual.mul_(_factors(residual, later, values, activation, squares, bound)[:, None, :])
    gradients: list[Tensor] = []
    for layer in reversed(range(0, len(later), 2)):
        value = values.pop()
        gradients = [torch.bmm(residual, value.transpose(1, 2)), residual.sum(2), *gradients]
        residual = _derive(torch.bmm(later[layer].transpose(1, 2), residual), value, activation)
    return _Flow(residual, gradients)


def _factors(
    residual: Tensor, later: list[Tensor], values: list[Tensor], activation: str, squares: Tensor, bound: float
) -> Tensor:
    """What clipping scales every input's gradient by, `(s, n)`; all that flows back is linear in the last residual."""
    total = torch.zeros_like(residual[:, 0])
    for layer in reversed(range(0, len(later), 2)):
        value = values[layer // 2]
        total += residual.square().sum(1) * (value.square().sum(1) + 1)
        residual = _derive(torch.bmm(later[layer].transpose(1, 2), residual), value.clone(), activation)
    return clip_factors(total + residual.square().sum(1) * (squares + 1), bound)


def _activate(inputs: Tensor, activation: str) -> Tensor:
    if activation == "elu":
        return F.elu_(inputs)
    return inputs.tanh_() if activation == "tanh" else inputs.relu_() if activation == "relu" else inputs.sigmoid_()


def _derive(gradient: Tensor, value: Tensor, activation: str) -> Tensor:
    """`gradient` times the derivative at the point where the activation has `value`; both may be overwritten."""
    if activation == "elu":
        return gradient.addcmul_(gradient, value.clamp_(max=0))
    if activation == "relu":
        return gradient.mul_(value.gt_(0))
    slope = value.square_().neg_().add_(1) if activation == "tanh" else value.addcmul_(value, value, value=-1)
    return gradient.mul_(slope)
