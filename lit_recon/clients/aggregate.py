"""Secure aggregation: the server receives only the mean of several clients' updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lit_recon.clients.local_steps import LocalSteps
from lit_recon.defenses.release import mixing_layer
from lit_recon.defenses.vectors import mean_update
from lit_recon.errors import ConfigError
from lit_recon.records import (
    Batch,
    BatchNormMode,
    BatchStatistics,
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


def several_steps(operator: ForwardOperator) -> LocalSteps | None:
    """The rule of every single client behind an update rule, if it takes several steps."""
    rule, _ = one_client(operator)
    return rule if isinstance(rule, LocalSteps) and rule.steps > 1 else None


def parts_of(observation: Observation) -> int:
    """Equal parts of the images, in order, such that an exchange of images between two of them changes the update.

    Those of mini-batches and of clients; one if the update is the same for every order, as far as the attacker knows.
    """
    defense = observation.defense
    own = defense is not None and len(defense.stages) > 0  # it may clip each client's update
    return 1 if observation.operator.additive and not own else observation.operator.parts


def normalized_apart(observation: Observation, batch_norm: BatchNormMode) -> int:
    """Equal parts of the images, in order, each of which BatchNorm layers normalize with its own statistics.

    Those of mini-batches and of clients; one if no layer uses statistics of the batch.
    """
    return 1 if mixing_layer(observation.model, batch_norm) is None else observation.operator.parts


def pooled(parts: Sequence[BatchStatistics]) -> BatchStatistics:
    """Statistics of the union of batches of equal size with the statistics `parts`."""

    def together(layers: Sequence[LayerStatistics]) -> LayerStatistics:
        mean = torch.stack([layer.mean for layer in layers]).mean(0)
        spread = [layer.var + (layer.mean - mean).square() for layer in layers]
        return LayerStatistics(mean, torch.stack(spread).mean(0))

    return {name: together([part[name] for part in parts]) for name in parts[0]}
