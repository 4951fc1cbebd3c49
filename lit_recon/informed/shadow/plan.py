"""Everything that decides what shadow models there will be: whose data, which network, which seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
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

#: The reference of models whose mini-batches nobody knows is the mean over so many orders.
_REFERENCE_ORDERS = 16
#: `known`: all models start from the same weights; `fresh`: each from weights of its own.
Initialization = Literal["known", "fresh"]


@dataclass(frozen=True, eq=False)
class ShadowPlan:
    """Models that are trained alike, each on the fixed set and one image of its own.

    Attributes:
        network: the architecture.
        fixed: the fixed set.
        descent: the optimizer.
        seed: of the initial weights, of noise and of the order of mini-batches.
        initialization: whether all models start alike, as an adversary can arrange who knows the initial weights.
        purpose: tells apart what is random in the models of an adversary and in those that were released: fresh initial
            weights, noise and unknown orders.
        device: that trains.
        start: known initial weights `(p,)` in the place of random ones, such as trained ones.
    """

    network: ReleasedNetwork
    fixed: ImageSet
    descent: GradientDescent
    seed: int = 0
    initialization: Initialization = "known"
    purpose: str = "shadow"
    device: str = "cpu"
    start: Tensor | None = None

    @property
    def known(self) -> KnownTraining:
        """The training on this plan's device."""
        return KnownTraining(self.network, self.fixed.pixels(), self.fixed.labels, self.descent).on(self.device)

    @property
    def is_repeatable(self) -> bool:
        """Whether models that are trained on the same images are the same."""
        return self.initialization == "known" and not self.descent.is_noisy and not self.descent.has_own_order

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
        if self.start is not None and not purpose:
            return self.start.clone()
        self.network.initialize(seeded_generator(self.seed, "initial weights", *purpose))
        return flat_weights(self.network)

    def reference(self) -> Tensor:
        """Float64 weights of the model without any further image, `(p,)`, or `(t * p,)` with snapshots."""
        orders = None
        if self.descent.batch_size is not None:
            orders = [seeded_generator(self.seed, "order")]
        if self.descent.has_own_order:
            orders = [seeded_generator(self.seed, "order", "reference", order) for order in range(_REFERENCE_ORDERS)]
        return train_reference(self.known, self.initial_weights().to(self.device), orders).cpu()

    def execution(self) -> Execution:
        """The fastest way for these models here."""
        return fastest_execution(self.known, self.initial_weights().to(self.device))

    def starts(self, members: range) -> Tensor:
        """Initial weights `(p,)` of all models, or `(s, p)` where each has its own."""
        if self.initialization == "known":
            return self.initial_weights()
        return torch.stack([self.initial_weights(self.purpose, member) for member in members])

    def generators(self, members: range) -> list[torch.Generator] | None:
        """Generators of every model's own noise or order of mini-batches, or of the order of all; None without."""
        if self.descent.is_noisy or self.descent.has_own_order:
            what = "noise" if self.descent.is_noisy else "order"
            return [seeded_generator(self.seed, what, self.purpose, member) for member in members]
        return None if self.descent.batch_size is None else [seeded_generator(self.seed, "order")]

    def train(self, images: ImageSet, members: range, execution: Execution, reference: Tensor) -> Tensor:
        """Differences `(s, p)`, float32 on the CPU, of the models of some of the images; `(s, t * p)` with snapshots.

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

    def train_shards(self, store: ShadowStore, shards: Sequence[int], images: ImageSet) -> Iterator[int]:
        """Train and keep the models of some shards of a store; yields each shard's number when it is there."""
        reference = self.reference()
        for shard in shards:
            self.train_shard(store, shard, images, reference)
            yield shard
