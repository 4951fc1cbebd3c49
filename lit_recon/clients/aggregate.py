"""Secure aggregation: the server receives only the mean of several clients' updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_recon.defenses.vectors import mean_update
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.records import (
    Batch,
    BatchStatistics,
    ClientUpdate,
    Differentiable,
    ForwardOperator,
    LayerStatistics,
    Observation,
    Update,
    Weights,
)


class SecureAggregation:
    """The mean of the updates of `clients` clients, each with an equal share of the images, in order.

    The cryptography (pairwise masks that cancel in the sum) is left out: it does not change the server's view. With an
    operator that takes one gradient, and without BatchNorm in train mode, the mean is the gradient of all images
    together; with local steps it is not. Differentiable if `operator`, every client's rule, is. A number of images that
    cannot be divided equally is a `ShapeError`. Defenses act on every client's own update (`defended_gradient`,
    `simulated_gradient`), not on this mean.

    Source: [Bonawitz2017].
    """

    def __init__(self, operator: ForwardOperator, clients: int = 1) -> None:
        if clients < 1:
            raise ConfigError(f"SecureAggregation needs at least 1 client; got {clients}")
        self.operator, self.clients = operator, clients
        self.batch_norm = operator.batch_norm

    @property
    def parts(self) -> int:
        return self.clients * self.operator.parts

    @property
    def additive(self) -> bool:
        return self.operator.additive

    def __call__(self, weights: Weights, batch: Batch, differentiable: Differentiable = "no") -> Update:
        return mean_update([self.operator(weights, share, differentiable) for share in batch.shares(self.clients)])

    def with_statistics(
        self, weights: Weights, batch: Batch, differentiable: Differentiable = "no"
    ) -> tuple[Update, BatchStatistics]:
        shares = batch.shares(self.clients)
        results = [self.operator.with_statistics(weights, share, differentiable) for share in shares]
        return mean_update([update for update, _ in results]), pooled([statistics for _, statistics in results])

    def statistics(self, weights: Weights, batch: Batch) -> BatchStatistics:
        return pooled([self.operator.statistics(weights, share) for share in batch.shares(self.clients)])


def one_client(operator: ForwardOperator) -> tuple[ForwardOperator, int]:
    """The rule of every single client behind an update rule, and their number."""
    if isinstance(operator, SecureAggregation):
        return operator.operator, operator.clients
    return operator, 1


def parts_of(observation: Observation) -> int:
    """Equal parts of the images, in order, such that an exchange of images between two of them changes the update.

    Those of mini-batches and of clients; one if the update is the same for every order, as far as the attacker knows.
    """
    defense = observation.defense
    own = defense is not None and len(defense.stages) > 0  # it may clip each client's update
    return 1 if observation.operator.additive and not own else observation.operator.parts


def aggregate(updates: Sequence[ClientUpdate]) -> ClientUpdate:
    """The server's view of several clients: the mean of their updates, weighted by their numbers of examples.

    Local defenses have been applied before. BatchNorm statistics are pooled if every client shares them. No update, or
    updates of different tensors, are a `ShapeError`.
    """
    if not updates:
        raise ShapeError("an aggregate needs at least one client's update; got none")
    shapes = [{name: value.shape for name, value in client.update.items()} for client in updates]
    if any(other != shapes[0] for other in shapes):
        raise ShapeError("clients' updates must name the same tensors of the same shapes: use one public model")
    counts = [client.n_examples for client in updates]
    shared = [client.batch_statistics for client in updates if client.batch_statistics is not None]
    statistics = pooled(shared, counts) if len(shared) == len(updates) else None
    names = updates[0].update
    mean = {name: _weighted([client.update[name] for client in updates], counts) for name in names}
    return ClientUpdate(mean, sum(counts), statistics)


def pooled(parts: Sequence[BatchStatistics], counts: Sequence[int] | None = None) -> BatchStatistics:
    """Statistics of the union of batches of `counts` examples (default: of equal size) with the statistics `parts`."""

    def together(layers: Sequence[LayerStatistics]) -> LayerStatistics:
        mean = _weighted([layer.mean for layer in layers], counts)
        spread = [layer.var + (layer.mean - mean).square() for layer in layers]
        return LayerStatistics(mean, _weighted(spread, counts))

    return {name: together([part[name] for part in parts]) for name in parts[0]}


def _weighted(values: Sequence[Tensor], counts: Sequence[int] | None) -> Tensor:
    if counts is None:
        return torch.stack(list(values)).mean(0)
    total = sum(counts)
    return torch.stack([value * (count / total) for value, count in zip(values, counts, strict=True)]).sum(0)
