"""The gradient that a defended client releases, and its simulation by an attacker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lit_recon.defenses.base import BatchGradient, Defense, Round, Stage
from lit_recon.defenses.example_gradients import ExampleGradients
from lit_recon.defenses.vectors import mean_update
from lit_recon.errors import ConfigError, ShapeError, UnsupportedModelError
from lit_recon.records import Batch, BatchNormMode, Differentiable, SimulatedDefense, Update

#: The gradients of the examples of a batch, or None for a model of other layers, as of `example_gradients`.
Examples = Callable[[Batch], ExampleGradients | None]
#: Examples per chunk of per-example gradients; `auto`: one on a CPU, several on a GPU.
Chunk = int | Literal["auto"]
_CHUNK_ON_GPU = 16


def per_example_gradients(
    gradient: BatchGradient, batch: Batch, chunk: Chunk = "auto", differentiable: Differentiable = "no"
) -> Iterator[Update]:
    """Gradients of the single examples of a batch, in order, in chunks of `(chunk, ...)`, at least 1, to limit memory.

    A chunk of one uses plain autograd, on a CPU the fastest and with the least memory; so do all with "autograd".
    Larger chunks, the default on a GPU, run under `torch.func.vmap`. With "functional", for use inside transforms of
    `torch.func`, all examples are in one chunk.
    """
    n = len(batch.images)
    if chunk != "auto" and chunk < 1:
        raise ConfigError(f"per-example gradients need a chunk of at least 1 example; got {chunk}")
    if differentiable == "functional":
        yield _together(gradient, batch)
        return
    width = chunk if chunk != "auto" else _CHUNK_ON_GPU if batch.images.is_cuda else 1
    if differentiable == "autograd" or width == 1:
        for i in range(n):
            single = gradient(batch.examples(i, i + 1), differentiable)
            yield {name: value.unsqueeze(0) for name, value in single.items()}
        return
    for start in range(0, n, width):
        yield _together(gradient, batch.examples(start, start + width))


def _together(gradient: BatchGradient, batch: Batch) -> Update:
    def of_one(one: Batch) -> Update:
        lifted = {name: mask.unsqueeze(0) for name, mask in one.masks.items()}
        return gradient(Batch(one.images.unsqueeze(0), one.labels.unsqueeze(0), lifted), "functional")

    gradients: Update = torch.func.vmap(of_one)(batch)
    return gradients


def mixing_layer(model: nn.Module, batch_norm: BatchNormMode) -> str | None:
    """The first BatchNorm layer by name that uses statistics of the client's batch in this mode; None without any."""
    norms = ((name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    found: Iterator[str] = (name for name, norm in norms if batch_norm == "train" or norm.running_mean is None)
    return next(found, None)


def require_separable(model: nn.Module, batch_norm: BatchNormMode, owner: object) -> None:
    """Raise an `UnsupportedModelError` if a BatchNorm layer makes one example's gradient depend on the others."""
    name = mixing_layer(model, batch_norm)
    if name is not None:
        raise UnsupportedModelError(
            f"{type(owner).__name__} needs per-example gradients, but BatchNorm layer {name!r} mixes the examples "
            "of a batch: use a backbone with GroupNorm (norm: group), or BatchNorm with running statistics "
            "(batch_norm: eval)"
        )


def defended_gradient(
    defense: Defense,
    model: nn.Module,
    gradient: BatchGradient,
    batch: Batch,
    generator: torch.Generator,
    chunk: Chunk = "auto",
    clients: int = 1,
    examples: Examples | None = None,
) -> Update:
    """The update that a client with this defense releases; in training, the direction of the optimizer's step.

    Gradients of single examples are computed only if the defense transforms them, `chunk` at a time; not where it only
    scales them and `examples` gives their norms. The prepared
    `model` is used for its structure only, the `gradient` is that of the mean loss. An empty batch is a `ShapeError`.

    With several `clients`, each has an equal share of the batch, in order, and defends its own update; the result is
    their mean. `gradient` is then that of one client. Every client draws from its own stream, whose seed is drawn from
    `generator`; a single client draws from `generator` itself.
    """
    shares = batches_of_clients(defense, model, batch, generator, clients)
    updates = [update_of_batch(defense, gradient, own, drawn, chunk, examples) for own, drawn in shares]
    return mean_update(updates)


def batches_of_clients(
    defense: Defense, model: nn.Module, batch: Batch, generator: torch.Generator, clients: int = 1
) -> list[tuple[Batch, torch.Generator]]:
    """Each client's batch after the defense's stage of the batch, and the generator of its other stages."""
    if len(batch.images) == 0:
        raise ShapeError("a client's update needs at least one example; got an empty batch: skip the round")
    own, shares = [generator], [batch]
    if clients > 1:
        seeds = torch.randint(2**62, (clients,), generator=generator, device=generator.device).tolist()
        own, shares = [torch.Generator(generator.device).manual_seed(seed) for seed in seeds], batch.shares(clients)
    return [(defense.transform_batch(share, model, drawn), drawn) for share, drawn in zip(shares, own, strict=True)]


def update_of_batch(
    defense: Defense,
    gradient: BatchGradient,
    batch: Batch,
    generator: torch.Generator,
    chunk: Chunk = "auto",
    examples: Examples | None = None,
) -> Update:
    """The stages of `defended_gradient` after that of the batch; arguments as there."""
    scaled = _scaled(defense, batch, examples)
    if scaled is not None:
        update = scaled
    elif Stage.PER_EXAMPLE in defense.stages:
        pieces = per_example_gradients(gradient, batch, chunk)
        update = _mean(defense.transform_per_example(piece, generator) for piece in pieces)
    else:
        update = gradient(batch)
    return defense.transform_update(update, Round(batch, gradient), generator)


def _scaled(defense: Defense, batch: Batch, examples: Examples | None) -> Update | None:
    """The mean of the transformed gradients, if the defense only scales them and their factors are known."""
    if examples is None or Stage.PER_EXAMPLE not in defense.stages or not _factors_are_own(type(defense)):
        return None
    found = examples(batch)
    factors = None if found is None else defense.example_factors(found.squared_norms())
    return None if found is None or factors is None else found.weighted(factors / len(batch.images))


def _factors_are_own(kind: type[Defense]) -> bool:
    """Whether the class that defines `example_factors` is the one that defines `transform_per_example`, or below it."""
    factors, transform = (
        next(i for i, parent in enumerate(kind.__mro__) if name in vars(parent))
        for name in ("example_factors", "transform_per_example")
    )
    return factors <= transform


def simulated_gradient(
    defense: SimulatedDefense,
    gradient: BatchGradient,
    candidate: Batch,
    observed: Update,
    differentiable: Differentiable = "no",
    clients: int = 1,
) -> Update:
    """A candidate's gradient after the simulated defense, for comparison with the update `observed`.

    `gradient` is that of the mean loss at the public weights and the defense's `simulate_buffers`. With several
    `clients` it is that of one; each has an equal share of the candidate, in order, whose update is defended before
    the mean is taken, and `defense` is an `AveragedDefense`.
    """
    if clients > 1:
        parts = [simulated_gradient(defense, gradient, s, observed, differentiable) for s in candidate.shares(clients)]
        return mean_update(parts)
    if Stage.PER_EXAMPLE not in defense.stages:
        update = gradient(candidate, differentiable)
    else:
        pieces = per_example_gradients(gradient, candidate, differentiable=differentiable)
        update = _mean(map(defense.simulate_per_example, pieces))
    return defense.simulate(update, observed)


def _mean(pieces: Iterable[Update]) -> Update:
    """Mean over all examples of gradients in chunks of `(chunk, ...)`."""
    total: Update = {}
    n = 0
    for piece in pieces:
        n += len(next(iter(piece.values())))
        for name, value in piece.items():
            total[name] = total[name] + value.sum(0) if name in total else value.sum(0)
    return {name: value / n for name, value in total.items()}
