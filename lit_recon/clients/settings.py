"""Settings of clients: update rule, loss, number of clients and random seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lit_recon.clients.aggregate import SecureAggregation
from lit_recon.clients.client import Client
from lit_recon.clients.gradient import GradientOperator
from lit_recon.clients.local_steps import LocalSteps, Optimizer, Release
from lit_recon.data.dataset import seeded_generator
from lit_recon.defenses import Defense
from lit_recon.errors import ConfigError
from lit_recon.records import BatchNormMode, ForwardOperator, Loss


@dataclass(frozen=True)
class LocalTraining:
    """Several steps of an optimizer on the client's images per round (FedAvg); see `LocalSteps`.

    Args:
        steps: number of local steps.
        lr: learning rate.
        momentum: in [0, 1).
        layer_lrs: other rates by prefix of parameter names.
        batches: number of mini-batches of equal size, used in turn; 1: every step takes all images.
        release: weights before minus after (`difference`), or that in units of a gradient (`gradient`).
        checkpointing: save memory in the attack's derivative by computing every step twice.
        optimizer: `sgd` or `adam`.
    """

    steps: int = 3
    lr: float = 0.01
    momentum: float = 0.0
    layer_lrs: Mapping[str, float] = field(default_factory=dict)
    batches: int = 1
    release: Release = "gradient"
    checkpointing: bool = False
    optimizer: Optimizer = "sgd"

    def operator(self, model: nn.Module, batch_norm: BatchNormMode, loss: Loss = cross_entropy) -> LocalSteps:
        """The client's update rule for a model."""
        return LocalSteps(model, batch_norm=batch_norm, loss=loss, **vars(self))


@dataclass(frozen=True)
class ClientSettings:
    """The clients of the federation.

    Args:
        batch_norm: BatchNorm layers use the running statistics (`eval`) or those of the client's batch (`train`).
        local_steps: local training; default: one gradient.
        n_clients: clients whose updates are averaged by secure aggregation; each holds an equal share of the batch, and
            defends its own update before the mean is taken.
        seed: seed of the defense's random numbers; every client draws its own.
        loss: training loss of clients: import path of a function, or class_path and init_args of a callable class, from
            logits (n, k) and labels (n,) to the mean loss; default: cross-entropy.
    """

    batch_norm: BatchNormMode = "eval"
    local_steps: LocalTraining | None = None
    n_clients: int = 1
    seed: int = 0
    loss: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.n_clients < 1:
            raise ConfigError(f"n_clients must be at least 1; got {self.n_clients}")

    def client(self, model: nn.Module, defense: Defense | None = None) -> Client:
        """A client, or several behind secure aggregation; arguments and errors as for `Client` and `LocalSteps`."""
        plain = self.local_steps is None and self.n_clients == 1
        rule = GradientOperator if plain else self._rule
        return Client(model, self.batch_norm, defense, rule, loss=self.loss or cross_entropy)

    def generator(self, index: int) -> torch.Generator:
        """The random numbers of the client with this index."""
        return seeded_generator(self.seed, "defense", index)

    def _rule(self, model: nn.Module, batch_norm: BatchNormMode, loss: Loss) -> ForwardOperator:
        own = self.local_steps.operator if self.local_steps is not None else GradientOperator
        operator = own(model, batch_norm, loss)
        return SecureAggregation(operator, self.n_clients) if self.n_clients > 1 else operator
