"""Shadow models by whichever way is fastest here, and what one image changes in a model's weights."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_recon.attacks.shadow.engines.batched_mlp import chunk_size, fits_batched_mlp, train_batched_mlp, train_without
from lit_recon.attacks.shadow.engines.general import clipped_sums, train_loop, train_vmap
from lit_recon.attacks.shadow.steps import Batches, Descent
from lit_recon.attacks.shadow.training import KnownTraining, flat_weights, full_precision, unflatten
from lit_recon.errors import ShapeError

#: `batched_mlp`: wide matrix products, MLPs only; `vmap`: any network, models side by side; `loop`: one by one.
Execution = Literal["batched_mlp", "vmap", "loop"]


def execution_of(recorded: str) -> Execution:
    """The way of training that a store's record names; `hand` is what stores before 0.2 call `batched_mlp`."""
    if recorded in ("batched_mlp", "hand"):
        return "batched_mlp"
    return "vmap" if recorded == "vmap" else "loop"


_WAYS: dict[Execution, Callable[[KnownTraining, Tensor, Tensor, Tensor, Sequence[torch.Generator] | None], Tensor]] = {
    "batched_mlp": train_batched_mlp,
    "vmap": train_vmap,
    "loop": train_loop,
}
#: Full batches, mini-batches and rounds of a measurement; the first round, which pays for what later ones reuse, does
#: not count.
_STEPS, _MINI_BATCHES, _ROUNDS = 2, 10, 3


def train_models(
    known: KnownTraining,
    initial: Tensor,
    images: Tensor,
    labels: Tensor,
    execution: Execution,
    generators: Sequence[torch.Generator] | None = None,
) -> Tensor:
    """Train one model per image on the fixed set and that image, in full float precision.

    Args:
        known: the training.
        initial: weights `(p,)` of all models, or `(s, p)` of each.
        images: own image of each model, `(s, c, h, w)` in [0, 1].
        labels: of those, `(s,)`.
        execution: how; all agree up to rounding.
        generators: of noise or of an unknown order of mini-batches, one per model; of a known order, one for all;
            needed for these only.

    Returns:
        Flat weights `(s, p)`; with snapshots `(s, t * p)`, of all released models in the order of their steps.

    Raises:
        ShapeError: arguments do not fit, or training diverged.
        UnsupportedModelError: the network cannot be trained this way.
    """
    with full_precision():
        trained = _WAYS[execution](known, initial, images, labels, generators)
    diverged = int((~torch.isfinite(trained).all(dim=1)).sum())
    if diverged:
        raise ShapeError(f"{diverged} of {len(trained)} models diverged to NaN or infinity: lower descent.lr")
    return trained


def train_reference(
    known: KnownTraining, initial: Tensor, generators: Sequence[torch.Generator] | None = None
) -> Tensor:
    """The model that all others are compared with: the same training but for the missing image's gradient.

    Its loss is the sum over the images of the fixed set divided by the number of all, so that what a released model's
    weights differ by is the work of its own image alone, of noise, and of an order that nobody else knows: the
    reference has no noise, and is the mean over several orders where the order is unknown.

    Args:
        known: the training.
        initial: weights `(p,)`.
        generators: of the order of mini-batches: one of a known order, some of an unknown one.

    Returns:
        Float64 weights `(p,)`, with snapshots `(t * p,)`: in float32 they would carry an error as large as a hundredth
        of that difference.
    """
    exact = known.on(known.images.device, torch.float64)
    if known.descent.dp is not None:
        return _clipped_reference(exact, initial.double())
    batches = Batches(exact, generators)
    orders = [slice(index, index + 1) for index in range(max(1, len(generators or ())))]
    return torch.stack([_without_own_image(exact, initial.double(), batches.of(order)) for order in orders]).mean(0)


def _without_own_image(known: KnownTraining, initial: Tensor, batches: Iterable[Tensor | None]) -> Tensor:
    network, n, kept, released = copy.deepcopy(known.network), len(known.images), known.kept_steps, []
    network.load_state_dict(unflatten(network, initial))
    optimizer = known.descent.torch_optimizer(network)
    with torch.enable_grad():
        for step, numbers in enumerate(batches, start=1):
            images, labels, size = known.images, known.labels, n + 1
            if numbers is not None:
                fixed = numbers[numbers < n]
                images, labels, size = images[fixed], labels[fixed], numbers.numel()
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels, reduction="sum").div(size).backward()
            optimizer.step()
            if step in kept:
                released.append(flat_weights(network))
    return torch.cat(released)


def _clipped_reference(known: KnownTraining, initial: Tensor) -> Tensor:
    if fits_batched_mlp(known.network):
        return train_without(known, initial)
    descent, weights, kept, released = known.descent, initial[None].clone(), known.kept_steps, []
    optimizer = Descent(descent, [weights])
    bound = descent.dp.bound if descent.dp is not None else math.inf
    for step in range(1, known.n_steps + 1):
        total = clipped_sums(known.network, weights, known.images, known.labels, bound)
        optimizer.step([total], scale=1 / (len(known.images) + 1))
        if step in kept:
            released.append(weights[0].clone())
    return torch.cat(released)


def deltas(weights: Tensor, reference: Tensor) -> Tensor:
    """What training on one more image changed, `(s, p)` float32: subtracted in float64, rounded afterwards.

    Args:
        weights: of models, `(s, p)`.
        reference: float64 `(p,)` of `train_reference`, of as many released models.
    """
    return (weights.double() - reference).float()


def fastest_execution(known: KnownTraining, initial: Tensor) -> Execution:
    """The way that takes the least time per model here, measured on a few steps."""
    steps = _STEPS if known.descent.batch_size is None else _MINI_BATCHES
    shorter = dataclasses.replace(known.descent, steps=steps, epochs=None, snapshots=())
    few = dataclasses.replace(known, descent=shorter)
    sizes: dict[Execution, int] = {"vmap": min(8, len(known.images)), "loop": 1}
    if fits_batched_mlp(known.network):
        sizes["batched_mlp"] = min(chunk_size(known), len(known.images))
    measured = {}
    for way, size in sizes.items():
        generators = [torch.Generator() for _ in range(shorter.n_generators(size))]
        run = partial(train_models, few, initial, known.images[:size], known.labels[:size], way, generators=generators)
        measured[way] = min([_seconds(run) for _ in range(_ROUNDS)][1:]) / size
    return min(measured, key=lambda way: measured[way])


def _seconds(run: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    run().sum().item()  # reading a number waits for the device
    return time.perf_counter() - started
