"""Training of shadow models of any architecture: many at once by `torch.func.vmap`, or one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from lit_recon.attacks.shadow.steps import Batches, Descent, add_noise, gathered, mechanism_of
from lit_recon.attacks.shadow.training import KnownTraining, add_gradient, cross_entropy, flat_weights, unflatten
from lit_recon.defenses.clipping import DPSGD, clipped_examples
from lit_recon.defenses.release import update_of_batch
from lit_recon.records import Batch, Differentiable, Update

#: Memory in bytes of the gradients of single images that are computed at a time.
_PIECE_BYTES = 64 * 2**20
#: Models that are trained at a time: at most so many, whose backward passes need so many bytes in all. The peak of a
#: convolutional network's step on 1,000 images is twice as high.
_MODELS, _STEP_BYTES = 32, 2 * 2**30


def models_at_a_time(known: KnownTraining, initial: Tensor) -> int:
    """Models that `train_vmap` trains at a time: fewer where the activations of a step take much memory."""
    descent, weights = known.descent, initial[0] if initial.dim() == 2 else initial
    if descent.dp is not None and descent.batch_size is None:
        return _MODELS  # `clipped_sums` bounds the images
    of_one, of_two = (_saved_bytes(known, weights, n) for n in (1, 2))
    images = descent.batch_size or len(known.images)
    return max(1, min(_MODELS, _STEP_BYTES // max(1, images * (of_two - of_one))))


def _saved_bytes(known: KnownTraining, weights: Tensor, n: int) -> int:
    """Bytes that the backward pass of a model needs of `n` images, and of its weights."""
    saved: list[int] = []

    def pack(value: Tensor) -> Tensor:
        saved.append(value.nbytes)
        return value

    images, labels = known.images[:1].expand(n, -1, -1, -1), known.labels[:1].expand(n)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        cross_entropy(known.network, weights.clone().requires_grad_(), images, labels)
    return sum(saved)


def train_vmap(
    known: KnownTraining,
    initial: Tensor,
    images: Tensor,
    labels: Tensor,
    generators: Sequence[torch.Generator] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Train `chunk` models at a time, by default `models_at_a_time`; see `train_models` for all else."""
    known.check(initial, images, labels, generators)
    chunk = chunk or models_at_a_time(known, initial)
    network, n, mechanism = known.network, len(known.images), mechanism_of(known)
    gradient = mean_loss_gradient(known)
    batches, kept, trained = Batches(known, generators), known.kept_steps, []
    for start in range(0, len(images), chunk):
        members = slice(start, start + chunk)
        own, own_labels = images[members], labels[members]
        weights = initial.expand(len(images), -1)[members].clone()
        optimizer, released = Descent(known.descent, [weights]), []
        for step, numbers in enumerate(batches.of(members), start=1):
            if numbers is not None:
                optimizer.step([_of_batch(known, weights, own, own_labels, numbers)], scale=1 / numbers.shape[-1])
            elif mechanism is None:
                optimizer.step([gradient(weights, own, own_labels)])
            else:
                total = clipped_sums(network, weights, known.images, known.labels, mechanism.bound)
                of_own = partial(_clipped_sum, network, bound=mechanism.bound)
                total += vmap(of_own)(weights, own[:, None], own_labels[:, None])
                add_noise(list(unflatten(network, total).values()), mechanism, (generators or ())[members])
                optimizer.step([total], scale=1 / (n + 1))
            if step in kept:
                released.append(weights.clone())
        trained.append(torch.cat(released, dim=1))
    return torch.cat(trained)


def mean_loss_gradient(known: KnownTraining) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Differentiable gradients `(s, p)` of the mean loss, given weights `(s, p)`, own images and their labels."""
    network, n = known.network, len(known.images)

    def loss(weights: Tensor, image: Tensor, label: Tensor) -> Tensor:
        parameters = unflatten(network, weights)
        fixed = F.cross_entropy(functional_call(network, parameters, known.images), known.labels, reduction="sum")
        own = F.cross_entropy(functional_call(network, parameters, image[None]), label[None])
        return (fixed + own) / (n + 1)

    return vmap(grad(loss))


def _of_batch(known: KnownTraining, weights: Tensor, own: Tensor, own_labels: Tensor, numbers: Tensor) -> Tensor:
    """Gradients of the loss summed over one mini-batch, `(s, p)`."""
    gradient, found = grad(partial(cross_entropy, known.network, reduction="sum")), torch.zeros_like(weights)
    if numbers.dim() == 2:
        images, labels = gathered(known.images, own, numbers), gathered(known.labels, own_labels, numbers)
        found += vmap(gradient)(weights, images, labels)
        return found
    fixed = numbers[numbers < len(known.images)]
    if len(fixed):
        found += vmap(gradient, in_dims=(0, None, None))(weights, known.images[fixed], known.labels[fixed])
    if len(fixed) < len(numbers):
        found += vmap(gradient)(weights, own[:, None], own_labels[:, None])
    return found


def clipped_sums(network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor, bound: float) -> Tensor:
    """Sums of the clipped gradients of all images, `(s, p)`, at each of the weights `(s, p)`."""
    size = max(1, _PIECE_BYTES // (weights.numel() * weights.element_size()))
    total, of_piece = torch.zeros_like(weights), partial(_clipped_sum, network, bound=bound)
    for piece, some_labels in zip(images.split(size), labels.split(size), strict=True):
        total += vmap(of_piece, in_dims=(0, None, None))(weights, piece, some_labels)
    return total


def _clipped_sum(network: nn.Module, weights: Tensor, images: Tensor, labels: Tensor, bound: float) -> Tensor:
    """Sum `(p,)` of the clipped gradients of images `(n, c, h, w)` at weights `(p,)`."""

    def loss(parameters: Update, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, parameters, image[None]), label[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(unflatten(network, weights), images, labels)
    return torch.cat([value.sum(0).flatten() for value in clipped_examples(gradients, bound).values()])


#: Images whose private gradients are computed at a time.
_EXAMPLES = 64


def train_loop(
    known: KnownTraining,
    initial: Tensor,
    images: Tensor,
    labels: Tensor,
    generators: Sequence[torch.Generator] | None = None,
) -> Tensor:
    """Train one model after the other, by PyTorch's optimizer and the defense's own code; see `train_models`."""
    known.check(initial, images, labels, generators)
    network, mechanism = copy.deepcopy(known.network), mechanism_of(known)
    batches, kept, trained = Batches(known, generators), known.kept_steps, []
    for index, (start, image, label) in enumerate(zip(initial.expand(len(images), -1), images, labels, strict=True)):
        network.load_state_dict(unflatten(network, start))
        optimizer = known.descent.torch_optimizer(network)
        whole = Batch(torch.cat([known.images, image[None]]), torch.cat([known.labels, label[None]]))
        generator = generators[index] if mechanism is not None and generators else torch.Generator()
        released = []
        with torch.enable_grad():
            for step, numbers in enumerate(batches.of(slice(index, index + 1)), start=1):
                batch = whole
                if numbers is not None:
                    batch = Batch(whole.images[numbers.flatten()], whole.labels[numbers.flatten()])
                optimizer.zero_grad()
                if mechanism is None:
                    add_gradient(network, batch.images, batch.labels, len(batch.labels))
                else:
                    _set_private_gradient(network, mechanism, batch, generator)
                optimizer.step()
                if step in kept:
                    released.append(flat_weights(network))
        trained.append(torch.cat(released))
    return torch.stack(trained) if trained else initial.new_empty(0, len(kept) * known.n_parameters)


def _set_private_gradient(network: nn.Module, mechanism: DPSGD, whole: Batch, generator: torch.Generator) -> None:
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}

    def gradient(batch: Batch, differentiable: Differentiable = "no") -> Update:
        def loss(parameters: Update) -> Tensor:
            return F.cross_entropy(functional_call(network, parameters, batch.images), batch.labels)

        found: Update = grad(loss)(weights)
        return found

    released = update_of_batch(mechanism, gradient, whole, generator, _EXAMPLES)
    for name, parameter in network.named_parameters():
        parameter.grad = released[name]
