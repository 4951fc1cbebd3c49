"""Everything that decides what shadow models there will be: whose data, which network, which seeds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_recon.data import ImageSet, content_hash
from lit_recon.data.seeding import seeded_generator
from lit_recon.informed.shadow.engine import Execution, deltas, fastest_execution, train_models, train_reference
from lit_recon.informed.shadow.store import ShadowStore
from lit_recon.informed.shadow.training import GradientDescent, KnownTraining, flat_weights
from lit_recon.models.released import ReleasedNetwork

#: `known`: all models start from the same weights; `fresh`: each from weights of its own.
Initialization = Literal["known", "fresh"]


@dataclass(frozen=True, eq=False)
class ShadowPlan:
    """Models that are trained alike, each on the fixed set and one image of its own.

    Attributes:
        network: the architecture.
        fixed: the fixed set.
        descent: the optimizer.
        seed: of the initial weights.
        initialization: whether all models start alike, as an adversary can arrange who knows the initial weights.
        purpose: tells the weights of fresh models apart: those of an adversary from those that were released.
        device: that trains.
    """

    network: ReleasedNetwork
    fixed: ImageSet
    descent: GradientDescent
    seed: int = 0
    initialization: Initialization = "known"
    purpose: str = "shadow"
    device: str = "cpu"

    @property
    def known(self) -> KnownTraining:
        """The training on this plan's device."""
        return KnownTraining(self.network, self.fixed.pixels(), self.fixed.labels, self.descent).on(self.device)

    @property
    def description(self) -> dict[str, object]:
        """What a store has to agree in."""
        start = self.initial_weights()
        return {
            **{f"network.{key}": value for key, value in self.network.architecture.items()},
            **{f"descent.{key}": value for key, value in self.descent.description.items()},
            "fixed_set": content_hash(self.fixed),
            "seed": self.seed,
            "initialization": self.initialization,
            "initial_weights": hashlib.sha256(start.numpy().tobytes()).hexdigest()[:16],
            "purpose": self.purpose,
        }

    def initial_weights(self, *purpose: int | str) -> Tensor:
        """Weights `(p,)` drawn for a purpose; without one, those that everybody knows where they are known."""
        self.network.initialize(seeded_generator(self.seed, "initial weights", *purpose))
        return flat_weights(self.network)

    def reference(self) -> Tensor:
        """Float64 weights `(p,)` of the model without any further image."""
        return train_reference(self.known, self.initial_weights().to(self.device)).cpu()

    def execution(self) -> Execution:
        """The fastest way for these models here."""
        return fastest_execution(self.known, self.initial_weights().to(self.device))

    def starts(self, members: range) -> Tensor:
        """Initial weights `(p,)` of all models, or `(s, p)` where each has its own."""
        if self.initialization == "known":
            return self.initial_weights()
        return torch.stack([self.initial_weights(self.purpose, member) for member in members])

    def generators(self, members: range) -> list[torch.Generator] | None:
        """Generators of the models' noise, of everyone's own; None without noise."""
        if not self.descent.is_noisy:
            return None
        return [seeded_generator(self.seed, "noise", self.purpose, member) for member in members]

    def train(self, images: ImageSet, members: range, execution: Execution, reference: Tensor) -> Tensor:
        """Differences `(s, p)`, float32 on the CPU, of the models of some of the images.

        Args:
            images: one per model of the whole plan.
            members: positions of the models to train now.
            execution: how.
            reference: of `reference`.

        Raises:
            ShapeError: the images do not fit the network, or training diverged.
        """
        own = images.subset(torch.tensor(list(members)))
        trained = train_models(
            self.known,
            self.starts(members).to(self.device),
            own.pixels().to(self.device),
            own.labels.to(self.device),
            execution,
            self.generators(members),
        )
        return deltas(trained.cpu(), reference)

    def train_shard(self, store: ShadowStore, shard: int, images: ImageSet, reference: Tensor) -> None:
        """Train the models of one shard of a store for these images, and keep them."""
        members = store.members(shard, len(images))
        execution: Execution = "hand" if store.execution == "hand" else "vmap" if store.execution == "vmap" else "loop"
        trained = self.train(images, members, execution, reference)
        store.write(shard, trained, images.subset(torch.tensor(list(members))))
