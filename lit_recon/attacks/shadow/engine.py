"""Training of shadow models by one of several equivalent implementations, and the reference they are compared to."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, repeat
from typing import Literal

import torch
from torch import Tensor

from lit_recon.attacks.shadow.engines.batched_mlp import chunk_size, fits_batched_mlp, train_batched_mlp, train_without
from lit_recon.attacks.shadow.engines.general import clipped_sums, models_at_a_time, train_loop, train_vmap
from lit_recon.attacks.shadow.steps import Batches, Descent
from lit_recon.attacks.shadow.training import KnownTraining, add_gradient, flat_weights, full_precision, unflatten
from lit_recon.errors import ShapeError

#: `batched_mlp`: batched matrix products, MLPs only; `vmap`: any network, many models at once; `loop`: one by one.
Execution = Literal["batched_mlp", "vmap", "loop"]


def execution_of(recorded: str) -> Execution:
    """The implementation named in a store."""
    return "batched_mlp" if recorded == "batched_mlp" else "vmap" if recorded == "vmap" else "loop"


_WAYS: dict[Execution, Callable[[KnownTraining, Tensor, Tensor, Tensor, Sequence[torch.Generator] | None], Tensor]] = {
    "batched_mlp": train_batched_mlp,
    "vmap": train_vmap,
    "loop": train_loop,
}
#: Steps with full batches, steps with mini-batches, and rounds of a time measurement; the first round is a warm-up.
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

    Returns flat weights `(s, p)`, with snapshots `(s, t * p)` in the order of their steps.

    Args:
        known: the training.
        initial: weights `(p,)` of all models, or `(s, p)` of each.
        images, labels: own image of each model, `(s, c, h, w)` in [0, 1], and its label, `(s,)`.
        execution: implementation; all agree up to rounding.
        generators: for noise or an unknown order of mini-batches one per model, for a known order one in all.

    Raises:
        ShapeError, UnsupportedModelError: arguments do not fit, or training diverged; not for this network.
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
    """The reference model: the same training without noise and without the gradient of the unknown image.

    Its loss is the sum over the images of the fixed set divided by the number of all images, so that the difference of
    a released model from it is due to the model's own image, to noise and to an unknown order of mini-batches only. An
    unknown order has several generators, whose references are averaged; a known one has one.

    Returns weights `(p,)`, with snapshots `(t * p,)`, float64: float32 errors are a hundredth of the differences.
    """
    exact = known.on(known.images.device, torch.float64)
    if known.descent.dp is not None:
        return _clipped_reference(exact, initial.double())
    batches, kept, references = Batches(exact, generators), known.kept_steps, []
    for index in range(max(1, len(generators or ()))):
        path = reference_path(exact, initial.double(), batches.of(slice(index, index + 1)))
        references.append(torch.cat([weights for step, weights in enumerate(path) if step in kept]))
    return torch.stack(references).mean(0)


def full_batch_path(known: KnownTraining, initial: Tensor) -> Iterator[Tensor]:
    """Weights `(p,)` of the reference before each step on full batches."""
    return islice(reference_path(known, initial, repeat(None)), known.n_steps)


def reference_path(known: KnownTraining, initial: Tensor, batches: Iterable[Tensor | None]) -> Iterator[Tensor]:
    """Weights `(p,)` of the reference before its first and after each step, one for each of the batches."""
    network, n = copy.deepcopy(known.network), len(known.images)
    network.load_state_dict(unflatten(network, initial))
    optimizer = known.descent.torch_optimizer(network)
    yield flat_weights(network)
    for numbers in batches:
        images, labels, size = known.images, known.labels, n + 1
        if numbers is not None:
            fixed = numbers[numbers < n]
            images, labels, size = images[fixed], labels[fixed], numbers.numel()
        optimizer.zero_grad()
        add_gradient(network, images, labels, size)
        optimizer.step()
        yield flat_weights(network)


def _clipped_reference(known: KnownTraining, initial: Tensor) -> Tensor:
    if fits_batched_mlp(known.network):
        return train_without(known, initial)
    weights, kept, released = initial[None].clone(), known.kept_steps, []
    optimizer = Descent(known.descent, [weights])
    bound = known.descent.dp.bound if known.descent.dp is not None else math.inf
    for step in range(1, known.n_steps + 1):
        total = clipped_sums(known.network, weights, known.images, known.labels, bound)
        optimizer.step([total], scale=1 / (len(known.images) + 1))
        if step in kept:
            released.append(weights[0].clone())
    return torch.cat(released)


def deltas(weights: Tensor, reference: Tensor) -> Tensor:
    """Differences of weights `(s, p)` from a float64 reference `(p,)`, float32: subtracted in float64, then rounded."""
    return (weights.double() - reference).float()


def fastest_execution(known: KnownTraining, initial: Tensor) -> Execution:
    """The implementation with the least time per model on this machine, measured on a few steps."""
    steps = _STEPS if known.descent.batch_size is None else _MINI_BATCHES
    shorter = dataclasses.replace(known.descent, steps=steps, epochs=None, snapshots=())
    few = dataclasses.replace(known, descent=shorter)
    sizes: dict[Execution, int] = {"vmap": min(models_at_a_time(known, initial), len(known.images)), "loop": 1}
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
