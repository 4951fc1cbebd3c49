"""A defended gradient: one function for the client and for training, and the attacker's simulation of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lit_recon.defenses.base import Batch, BatchGradient, Defense, Round, Stage
from lit_recon.defenses.per_example import Chunk, per_example_gradients
from lit_recon.errors import ShapeError
from lit_recon.models import Backbone
from lit_recon.records import DefenseCounterpart, ForwardOperator, Update


def at_weights(
    operator: ForwardOperator, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> BatchGradient:
    """The operator as a function of the batch alone; the batch's masks take the place of buffers of the same names."""

    def gradient(batch: Batch, *, create_graph: bool = False, functional: bool = False) -> Update:
        replaced = {**buffers, **batch.masks}
        return operator(
            parameters, replaced, batch.images, batch.labels, create_graph=create_graph, functional=functional
        )

    return gradient


def defended_gradient(
    defense: Defense,
    model: Backbone,
    gradient: BatchGradient,
    batch: Batch,
    generator: torch.Generator,
    chunk: Chunk = "auto",
) -> Update:
    """What a client with this defense releases; in training, what its optimizer steps along.

    Gradients of single examples are taken only where the defense acts on them, a few at a time.

    Args:
        defense: one, or a `Chain`.
        model: prepared by the defense; read for its structure only.
        gradient: of the mean loss, at the weights of this round.
        batch: as it came from the data.
        generator: of all the defense's random numbers. They are the same whatever `chunk` is, except where a defense
            adds noise to the gradients of single examples.
        chunk: examples at once.

    Raises:
        ShapeError: an empty batch.
    """
    if len(batch.images) == 0:
        raise ShapeError("a release needs at least one example; got an empty batch: skip the round")
    batch = defense.transform_batch(batch, model, generator)
    if Stage.PER_EXAMPLE in defense.stages:
        pieces = per_example_gradients(gradient, batch, chunk)
        update = _mean(defense.transform_per_example(piece, generator) for piece in pieces)
    else:
        update = gradient(batch)
    return defense.transform_update(update, Round(batch, gradient), generator)


def simulated_gradient(
    defense: DefenseCounterpart,
    gradient: BatchGradient,
    candidate: Batch,
    observed: Update,
    *,
    create_graph: bool = False,
    functional: bool = False,
) -> Update:
    """What the defense would have made of a candidate's gradient, as far as an attacker who knows it can tell.

    Args:
        defense: the client's.
        gradient: of the mean loss, at the public weights and the defense's `counterpart_buffers`.
        candidate: images and labels.
        observed: what the client released.
        create_graph: keep the result differentiable in the candidate.
        functional: differentiate by `torch.func`, for use inside its transforms.
    """
    if Stage.PER_EXAMPLE not in defense.stages:
        update = gradient(candidate, create_graph=create_graph, functional=functional)
    else:
        pieces = per_example_gradients(gradient, candidate, create_graph=create_graph, functional=functional)
        update = _mean(map(defense.counterpart_per_example, pieces))
    return defense.counterpart(update, observed)


def _mean(pieces: Iterable[Update]) -> Update:
    """Mean over all examples of gradients that come in pieces of `(chunk, ...)`."""
    total: Update = {}
    n = 0
    for piece in pieces:
        n += len(next(iter(piece.values())))
        for name, value in piece.items():
            total[name] = total[name] + value.sum(0) if name in total else value.sum(0)
    return {name: value / n for name, value in total.items()}
