"""Clients as a configuration describes them: what they compute, how many of them, with which random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lit_recon.clients.aggregate import SecureAggregation
from lit_recon.clients.batch_norm import BatchNormMode
from lit_recon.clients.client import Client
from lit_recon.clients.gradient import GradientOperator
from lit_recon.clients.local_steps import LocalSteps, Release
from lit_recon.data.seeding import seeded_generator
from lit_recon.defenses import Defense
from lit_recon.errors import ConfigError
from lit_recon.models import Backbone
from lit_recon.records import ForwardOperator


@dataclass(frozen=True)
class LocalTraining:
    """Several steps of SGD on the client's own images before it answers (FedAvg); see `LocalSteps`.

    Args:
        steps: of local training.
        lr: learning rate.
        momentum: in [0, 1).
        layer_lrs: other rates by prefix of parameter names.
        batches: mini-batches of equal size that the steps go through in turn; 1: every step sees all images.
        release: weights before minus after (`difference`), or that in units of a gradient (`gradient`).
        checkpointing: save memory in the attack's derivative by computing every step twice.
    """

    steps: int = 3
    lr: float = 0.01
    momentum: float = 0.0
    layer_lrs: Mapping[str, float] = field(default_factory=dict)
    batches: int = 1
    release: Release = "gradient"
    checkpointing: bool = False

    def operator(self, model: Backbone, batch_norm: BatchNormMode) -> LocalSteps:
        """The rule, for a model."""
        return LocalSteps(
            model,
            self.steps,
            self.lr,
            self.momentum,
            self.layer_lrs,
            self.batches,
            self.release,
            batch_norm,
            self.checkpointing,
        )


@dataclass(frozen=True)
class ClientSettings:
    """The clients of the federation.

    Args:
        batch_norm: BatchNorm layers use the running statistics (`eval`) or those of the client's batch (`train`).
        local_steps: local training; default: one gradient.
        n_clients: clients whose updates are averaged securely before anybody sees them; each holds an equal share of
            the batch.
        seed: of the defense's random numbers; every client draws its own.

    Raises:
        ConfigError: less than one client.
    """

    batch_norm: BatchNormMode = "eval"
    local_steps: LocalTraining | None = None
    n_clients: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_clients < 1:
            raise ConfigError(f"n_clients must be at least 1; got {self.n_clients}")

    def client(self, model: Backbone, defense: Defense | None = None) -> Client:
        """A client, or what several of them release together.

        Raises:
            UnsupportedModelError, ConfigError: see `Client` and `LocalSteps`.
        """
        plain = self.local_steps is None and self.n_clients == 1
        return Client(model, self.batch_norm, defense, GradientOperator if plain else self._rule)

    def generator(self, index: int) -> torch.Generator:
        """The random numbers of the client with this index."""
        return seeded_generator(self.seed, "defense", index)

    def _rule(self, model: Backbone, batch_norm: BatchNormMode) -> ForwardOperator:
        own = self.local_steps.operator if self.local_steps is not None else GradientOperator
        operator = own(model, batch_norm)
        return SecureAggregation(operator, self.n_clients) if self.n_clients > 1 else operator
