"""Training of many MLPs at once by batched matrix products, in chunks that fit into the processor's cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lit_recon.attacks.shadow.engines.dual import ImageSpan, suits, train_dual
from lit_recon.attacks.shadow.engines.mlp_gradients import (
    ACTIVATIONS,
    OwnImages,
    SharedImages,
    separate_gradients,
    shared_gradients,
)
from lit_recon.attacks.shadow.engines.pixels import UsedPixels, block_size
from lit_recon.attacks.shadow.private import add_noise, mechanism_of
from lit_recon.attacks.shadow.steps import Batches, Descent
from lit_recon.attacks.shadow.training import KnownTraining, unflatten
from lit_recon.errors import UnsupportedModelError
from lit_recon.models.released import ReleasedMLP

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
    """Train one model per image on the fixed set and that image, `chunk` models at a time; default: `chunk_size`.

    Arguments, result and errors as for `train_loop`; besides:

    Raises:
        UnsupportedModelError: the network is not an MLP with a hidden layer and a supported activation.
    """
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
    """Training by full batches without own images and without noise, for the reference.

    Args:
        known: the training.
        initial: weights `(p,)`.

    Returns:
        Flat weights `(p,)`; with snapshots `(t * p,)`.

    Raises:
        UnsupportedModelError: as for `train_batched_mlp`.
    """
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
    network, descent, n = _mlp(known.network), known.descent, len(known.images)
    activation, n_classes = network.activation, network.linear_layers[-1].out_features
    weights = _apart(known, initial)
    optimizer, kept, released = Descent(descent, weights), known.kept_steps, []
    mechanism = mechanism_of(descent.dp, known.n_steps)
    bound = None if mechanism is None else mechanism.bound
    for step, numbers in enumerate(batches, start=1):
        if numbers is None:
            gradients = shared_gradients(weights, whole, own, activation, bound)
            if mechanism is not None and own is not None:
                add_noise(gradients, mechanism, noise)
        elif own is None or numbers.dim() == 1:
            fixed = numbers[numbers < n]
            part = SharedImages(whole.images[fixed], whole.labels[fixed], n_classes)
            gradients = shared_gradients(weights, part, own if len(fixed) < len(numbers) else None, activation)
        else:
            gradients = separate_gradients(weights, whole, own, numbers, activation)
        optimizer.step(gradients, scale=1 / (n + 1 if numbers is None else numbers.shape[-1]))
        if step in kept:
            released.append(torch.cat([weight.flatten(1) for weight in weights], dim=1))
    return torch.cat(released, dim=1)
