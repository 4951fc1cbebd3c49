"""Training of many MLPs at once by batched matrix products, in chunks that fit into the processor's cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_recon.attacks.shadow.engines.mlp_gradients import (
    ACTIVATIONS,
    Clip,
    OwnImages,
    SharedImages,
    flow,
    one_hot,
    products_with_one,
    separate_gradients,
    shared_gradients,
)
from lit_recon.attacks.shadow.engines.pixels import UsedPixels, block_size, times_transposed
from lit_recon.attacks.shadow.steps import Batches, Descent, add_noise, mechanism_of
from lit_recon.attacks.shadow.training import GradientDescent, KnownTraining, unflatten
from lit_recon.errors import UnsupportedModelError
from lit_recon.models.released import ReleasedMLP


def suits(descent: GradientDescent, fixed: SharedImages) -> bool:
    """Whether dual coordinates need less arithmetic; they need linear steps, without noise outside the images' span."""
    linear = descent.optimizer == "sgd" and descent.batch_size is None and not descent.is_noisy
    return linear and len(fixed.images) < 2 * fixed.pixels.n_often(fixed.images)


class ImageSpan(NamedTuple):
    """The fixed images, split into multiples of their mean and remainders."""

    mean: Tensor  # `(d,)`
    sides: Tensor  # remainders, `(n, d)`: the images minus `shares` times the mean
    products: Tensor  # inner products of remainders, `(n, n)`
    shares: Tensor  # projection coefficients of the images on the mean, `(n,)`
    mean_products: Tensor  # inner products of the images with the mean, `(n,)`

    @classmethod
    def of(cls, images: Tensor) -> ImageSpan:
        """Of images `(n, d)`; computed in float64, then rounded."""
        exact = images.double()
        mean = exact.mean(0)
        mean_products = exact @ mean
        shares = (mean_products / mean.square().sum()).nan_to_num()  # 0 / 0 if all images are black
        sides = exact - shares[:, None] * mean
        found = mean, sides, sides @ sides.T, shares, mean_products
        return cls(*(part.to(images.dtype) for part in found))


class FirstLayers:
    """The first layers of many models, as coefficients of the fixed images `(n, d)` and of own images `(s, d)`.

    They start from weights `(s, h, d)` and biases `(s, h)`. `sides` `(s, h, n)` are coefficients of the remainders, and
    `rest` `(s, h, 3)` those of the mean and of the own image, and the bias.
    """

    def __init__(self, weights: Tensor, bias: Tensor, fixed: Tensor, span: ImageSpan, own: Tensor) -> None:
        self._weights, self._span, self._own = weights, span, own
        zeros = torch.zeros_like(bias)
        self.sides = weights.new_zeros(*bias.shape, len(fixed))
        self.rest = torch.stack([zeros, zeros, bias], dim=2)
        # Errors of these constants would add up over all steps: they are computed in float64.
        alone = own.double()
        between = alone @ fixed.T.double()
        one = torch.ones_like(between)
        self._rest_products = torch.stack([span.mean_products.expand_as(one), between, one], dim=1).to(own.dtype)
        own_mean, squares = alone @ span.mean.double(), alone.square().sum(1)
        self._own_rest_products = torch.stack([own_mean, squares, one[:, 0]], dim=1).to(own.dtype)
        self._own_products = (alone @ span.sides.T.double()).to(own.dtype)
        self._outputs = (weights.double() @ fixed.T.double()).to(own.dtype)
        self._own_outputs = torch.bmm(weights.double(), alone[:, :, None]).to(own.dtype)

    def outputs(self) -> Tensor:
        """For the fixed images, `(s, h, n)`."""
        outputs = _wide(self.sides, self._span.products).add_(self._outputs)
        return outputs.baddbmm_(self.rest, self._rest_products)

    def own_outputs(self) -> Tensor:
        """For every model's own image, `(s, h, 1)`."""
        outputs = products_with_one(self.sides, self._own_products).add_(self._own_outputs)
        return outputs.add_(products_with_one(self.rest, self._own_rest_products))

    def gradients(self, many: Tensor, one: Tensor) -> list[Tensor]:
        """Gradients of `sides` and `rest`, given those of `outputs` and `own_outputs`."""
        of_mean = torch.mv(many.flatten(0, 1), self._span.shares).view_as(one)
        return [many, torch.cat([of_mean, one, many.sum(2, keepdim=True).add_(one)], dim=2)]

    def weights(self) -> tuple[Tensor, Tensor]:
        """Current weights `(s, h, d)` and biases `(s, h)`."""
        of_mean, of_own, bias = self.rest.split(1, dim=2)
        moved = _wide(self.sides, self._span.sides.T).addcmul_(of_mean, self._span.mean)
        return moved.addcmul_(of_own, self._own[:, None, :]).add_(self._weights), bias[:, :, 0].clone()


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T` of `(s, h, q)` and `(m, q)`."""
    return times_transposed(left.flatten(0, 1), right).view(*left.shape[:2], len(right))


def train_dual(
    known: KnownTraining, activation: str, fixed: SharedImages, span: ImageSpan, weights: list[Tensor], own: OwnImages
) -> Tensor:
    """Train one model per own image, all at once, in dual coordinates, for a training that `suits` them.

    The weights of the start, `(s, o, i)` and `(s, o)` for every layer, are overwritten. Results as of `train_models`.
    """
    descent, n, released = known.descent, len(fixed.images), []
    layers, later = FirstLayers(weights[0], weights[1], fixed.images, span, own.images), weights[2:]
    classes = one_hot(own.labels, len(fixed.classes), own.images.dtype)[:, :, None]
    clip = own_clip = None
    if descent.dp is not None:
        bound = descent.dp.bound
        clip, own_clip = Clip(fixed.squares, bound), Clip(own.images.square().sum(1, keepdim=True), bound)
    optimizer, kept = Descent(descent, [layers.sides, layers.rest, *later]), known.kept_steps
    for step in range(1, known.n_steps + 1):
        many = flow(layers.outputs(), later, fixed.classes, activation, clip)
        one = flow(layers.own_outputs(), later, classes, activation, own_clip)
        both = [part.add_(more) for part, more in zip(many.later, one.later, strict=True)]
        optimizer.step([*layers.gradients(many.first, one.first), *both], scale=1 / (n + 1))
        if step in kept:
            released.append(torch.cat([part.flatten(1) for part in (*layers.weights(), *later)], dim=1))
    return torch.cat(released, dim=1)


#: Bytes of a chunk on a CPU: of one hidden layer for a block of images, which should stay in the cache between two
#: products; of the tensors of a step with a mini-batch. On other devices: enough work for every kernel.
_LAYER_BYTES, _BATCH_BYTES, _BYTES_ELSEWHERE = 5 * 2**18, 4 * 2**20, 256 * 2**20


def fits_batched_mlp(network: nn.Module) -> bool:
    """Whether `train_batched_mlp` can train this network."""
    return isinstance(network, ReleasedMLP) and network.activation in ACTIVATIONS and len(network.linear_layers) > 1


def chunk_size(known: KnownTraining) -> int:
    """Models at a time: on a CPU as many as keep their hidden layers in the cache, elsewhere as fit into memory."""
    layers, batch, size = _mlp(known.network).linear_layers, known.descent.batch_size, _LAYER_BYTES
    per_model = max(layer.out_features for layer in layers) * block_size(known.images, batch)
    if batch is not None:
        # For small batches weights are larger than a layer's outputs; batches of a model's own take memory, too.
        images = layers[0].in_features * batch if known.descent.has_own_order else 0
        per_model, size = max(per_model, images, known.n_parameters), _BATCH_BYTES
    if known.images.device.type != "cpu":
        size = _BYTES_ELSEWHERE
    return max(1, size // (known.images.element_size() * per_model))


@torch.no_grad()
def train_batched_mlp(
    known: KnownTraining,
    initial: Tensor,
    images: Tensor,
    labels: Tensor,
    generators: Sequence[torch.Generator] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Train `chunk` models at a time, by default `chunk_size`; arguments, result and errors as for `train_models`."""
    known.check(initial, images, labels, generators)
    size, batches = chunk or chunk_size(known), Batches(known, generators)
    fixed, trained = prepared(known), []
    span = ImageSpan.of(fixed.images) if suits(known.descent, fixed) else None
    for start in range(0, len(images), size):
        members = slice(start, start + size)
        own = OwnImages(images[members].flatten(1), labels[members])
        starts, noise = initial.expand(len(images), -1)[members], (generators or ())[members]
        if span is not None:
            trained.append(train_dual(known, _mlp(known.network).activation, fixed, span, _apart(known, starts), own))
        else:
            trained.append(_train_chunk(known, fixed, starts, batches.of(members), own, noise))
    return torch.cat(trained)


@torch.no_grad()
def train_without(known: KnownTraining, initial: Tensor) -> Tensor:
    """Weights `(p,)` of the reference, with snapshots `(t * p,)`: without own images and noise, by full batches."""
    return _train_chunk(known, prepared(known), initial[None], Batches(known, None).of(slice(1)))[0]


def _mlp(network: nn.Module) -> ReleasedMLP:
    if not fits_batched_mlp(network) or not isinstance(network, ReleasedMLP):
        raise UnsupportedModelError(
            "execution batched_mlp needs a ReleasedMLP with a hidden layer and an activation among "
            f"{', '.join(ACTIVATIONS)}; got {type(network).__name__}: use execution vmap or loop"
        )
    return network


def prepared(known: KnownTraining) -> SharedImages:
    """The fixed set, prepared for products; with mini-batches, these are prepared in every step instead."""
    images, n_classes = known.images.flatten(1).contiguous(), _mlp(known.network).linear_layers[-1].out_features
    pixels = UsedPixels.of(images) if known.descent.batch_size is None else None
    return SharedImages(images, known.labels, n_classes, pixels)


def _apart(known: KnownTraining, initial: Tensor) -> list[Tensor]:
    """Copies of the weights and biases of every layer of models `(s, p)`."""
    parts = unflatten(known.network, initial).values()
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def _train_chunk(
    known: KnownTraining,
    whole: SharedImages,
    initial: Tensor,
    batches: Iterable[Tensor | None],
    own: OwnImages | None = None,
    noise: Sequence[torch.Generator] = (),
) -> Tensor:
    activation, n, weights = _mlp(known.network).activation, len(known.images), _apart(known, initial)
    optimizer, kept, released = Descent(known.descent, weights), known.kept_steps, []
    mechanism = mechanism_of(known)
    bound = None if mechanism is None else mechanism.bound
    for step, numbers in enumerate(batches, start=1):
        if numbers is None:
            gradients = shared_gradients(weights, whole, own, activation, bound)
            if mechanism is not None and own is not None:
                add_noise(gradients, mechanism, noise)
        elif own is None or numbers.dim() == 1:
            fixed = numbers[numbers < n]
            part = SharedImages(whole.images[fixed], whole.labels[fixed], len(whole.classes))
            gradients = shared_gradients(weights, part, own if len(fixed) < len(numbers) else None, activation)
        else:
            gradients = separate_gradients(weights, whole, own, numbers, activation)
        optimizer.step(gradients, scale=1 / (n + 1 if numbers is None else numbers.shape[-1]))
        if step in kept:
            released.append(torch.cat([weight.flatten(1) for weight in weights], dim=1))
    return torch.cat(released, dim=1)
