"""A federated client and its settings: its update from private images, and the attacker's observation of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from lit_recon.clients.aggregate import SecureAggregation, one_client, pooled
from lit_recon.clients.gradient import GradientOperator, checked_loss
from lit_recon.clients.local_steps import LocalSteps, Optimizer, Release
from lit_recon.data.dataset import seeded_generator
from lit_recon.defenses import AveragedDefense, Defense, Stage
from lit_recon.defenses.combined import seen_in_mean
from lit_recon.defenses.release import batches_of_clients, update_of_batch
from lit_recon.defenses.vectors import mean_update
from lit_recon.errors import ConfigError, ShapeError, UnsupportedModelError
from lit_recon.models import public_model
from lit_recon.records import (
    Batch,
    BatchNormMode,
    ClientUpdate,
    ForwardOperator,
    Knowledge,
    Loss,
    Normalization,
    Observation,
    Weights,
)

#: Builds a client's update rule from a model, the mode of its BatchNorm layers and the loss.
Rule = Callable[[nn.Module, BatchNormMode, Loss], ForwardOperator]


def _like(model: nn.Module) -> Tensor:
    """A parameter in the dtype and on the device of images and logits; `public_model` refuses models without any."""
    return next(value for value in model.parameters() if value.is_floating_point())


class Client:
    """A client that releases an update of the global model.

    Args:
        model: the global model: any module from images `(n, c, h, w)` to logits `(n, k)`; not modified.
        batch_norm: BatchNorm layers use running (`eval`) or batch statistics (`train`).
        defense: of the update; default: none. Behind `SecureAggregation`, of every client's own update.
        rule: the update rule, given the model as the defense prepares it; default: one gradient of the mean loss.
        image_shape, normalization: see `lit_recon.models.public_model`, whose errors are raised.
        loss: of logits `(n, k)` and labels `(n,)`, the mean of the losses of single examples.

    Raises:
        UnsupportedModelError: the defense does not support this model.
        ConfigError: the defense acts on per-example gradients, which the rule does not have; or a loss that does not
            take logits and labels, or is not the mean of the losses of single examples.

    >>> module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    >>> client = Client(module, image_shape=(3, 8, 8), normalization=Normalization((0.5,) * 3, (0.25,) * 3))
    >>> sorted(client.release(torch.rand(2, 3, 8, 8), torch.tensor([1, 7])).update)
    ['0.bias', '0.weight', '2.bias', '2.weight']
    """

    def __init__(
        self,
        model: nn.Module,
        batch_norm: BatchNormMode = "eval",
        defense: Defense | None = None,
        rule: Rule = GradientOperator,
        *,
        image_shape: Sequence[int] | None = None,
        normalization: Normalization | None = None,
        loss: Loss = cross_entropy,
    ) -> None:
        self.defense = defense or Defense()
        public, self.image_shape, self.normalization, self.n_classes = public_model(model, image_shape, normalization)
        self.loss = checked_loss(loss, self.n_classes, _like(public))
        self.model: nn.Module = self.defense.prepare(public, batch_norm)
        self.batch_norm: BatchNormMode = batch_norm
        self._rule = rule
        self._operator = rule(self.model, batch_norm, self.loss)
        self._own, self._clients = one_client(self._operator)
        if Stage.PER_EXAMPLE in self.defense.stages and not isinstance(self._own, GradientOperator):
            raise ConfigError(
                f"{self.defense} acts on the gradient of every single example, but this client releases the result of "
                "several steps: take one step (leave local_steps out), or a defense of the update, such as "
                "GradientClipping with GaussianNoise"
            )
        self._weights = Weights.of(self.model)

    def to(self, device: torch.device | str) -> Client:
        """A copy of the client whose model is on another device; a ConfigError for a loss with tensors on the first."""
        moved = copy.copy(self)  # the operator takes weights and buffers as arguments, on any device
        moved.model = copy.deepcopy(self.model).to(device)
        moved._weights = Weights.of(moved.model)
        checked_loss(self.loss, self.n_classes, _like(moved.model))
        return moved

    def release(
        self, images: Tensor, labels: Tensor, generator: torch.Generator | None = None, share_statistics: bool = True
    ) -> ClientUpdate:
        """The update for private images `(n, c, h, w)` in [0, 1] and labels `(n,)`.

        The defense draws its random numbers from `generator`; default: a fresh one with seed 0 at every call. With
        `share_statistics`, the statistics at every BatchNorm layer of the batch, as the defense transforms it, are
        released too; later stages of the defense do not change them.

        Raises:
            ShapeError: images of a wrong shape, dtype or range, or labels that are no classes of the model.
            ConfigError: the defense mixes labels, and the loss does not take probabilities.
        """
        self._check(images, labels)
        batch, statistics = Batch(images.to(_like(self.model).dtype), labels), None
        self._check_loss(batch)
        drawn = generator or torch.Generator().manual_seed(0)
        shares = batches_of_clients(self.defense, self.model, batch, drawn, self._clients)
        own = partial(self._own, self._weights)
        update = mean_update([update_of_batch(self.defense, own, *share) for share in shares])
        if share_statistics:
            # of the images that the update is of, such as mixtures
            found = pooled([self._own.statistics(self._weights, defended) for defended, _ in shares])
            statistics = {name: type(layer)(*(part.detach() for part in layer)) for name, layer in found.items()}
        return ClientUpdate(update, len(images), statistics)

    @cached_property
    def simulated_defense(self) -> Defense | AveragedDefense:
        """The defense as an attacker simulates it; a `ConfigError` if it cannot be for the mean of several clients."""
        return seen_in_mean(self.defense, self._clients)

    def observe(
        self,
        images: Tensor,
        labels: Tensor,
        knowledge: Knowledge | None = None,
        generator: torch.Generator | None = None,
    ) -> Observation:
        """The observation by an attacker with `knowledge` of the update that `release` computes.

        With `knowledge.batch_norm == "none"` the attacker simulates the client with the statistics of the candidates.
        A `ConfigError` says that `knowledge.defense` is of no use: see `simulated_defense`; or that the candidates that
        a defense takes one by one have no statistics.
        """
        knowledge = knowledge or Knowledge()
        public, operator = self.model, self._operator
        if knowledge.batch_norm == "none":
            public = copy.deepcopy(self.model)
            for module in public.modules():
                if isinstance(module, _BatchNorm):
                    module.reset_running_stats()
            operator = self._rule(public, "train", self.loss)
            if knowledge.defense and Stage.PER_EXAMPLE in self.defense.stages:
                self._require_statistics_of_one(operator)
        released = self.release(images, labels, generator, knowledge.batch_norm == "batch")
        return Observation(
            model=public,
            parameters=self._weights.parameters,
            buffers=dict(public.named_buffers()),
            operator=operator,
            update=released.update,
            n_examples=released.n_examples,
            image_shape=self.image_shape,
            n_classes=self.n_classes,
            normalization=self.normalization,
            knowledge=knowledge,
            labels=labels.clone() if knowledge.labels else None,
            batch_statistics=released.batch_statistics,
            defense=self.simulated_defense if knowledge.defense else None,
            loss=self.loss,
        )

    def _require_statistics_of_one(self, operator: ForwardOperator) -> None:
        """Refuse a simulation of single examples that BatchNorm layers cannot normalize by themselves."""
        like = next(iter(self._weights.parameters.values()))
        one = Batch(like.new_zeros(1, *self.image_shape), torch.zeros(1, dtype=torch.int64, device=like.device))
        try:
            one_client(operator)[0](self._weights, one)
        except UnsupportedModelError as error:
            raise ConfigError(
                "with knowledge.batch_norm 'none' the attacker normalizes candidates by their own statistics, and "
                f"simulates {self.defense} on one at a time; a BatchNorm layer of this model then has a single value "
                "per channel: set knowledge.batch_norm to running, or knowledge.defense to false"
            ) from error

    def _check_loss(self, batch: Batch) -> None:
        """Refuse a loss of classes for labels that the defense turns into probabilities."""
        if self.loss is cross_entropy or Stage.BATCH not in self.defense.stages:
            return
        if self.defense.transform_batch(batch, self.model, torch.Generator().manual_seed(0)).labels.dim() != 2:
            return
        try:
            checked_loss(self.loss, self.n_classes, batch.images, probabilities=True)
        except ConfigError as error:
            raise ConfigError(
                f"{self.defense} turns labels into probabilities, but {error}: take a loss that accepts both, such as "
                "cross-entropy, or another defense"
            ) from error

    def _check(self, images: Tensor, labels: Tensor) -> None:
        if images.dim() != 4 or tuple(images.shape[1:]) != self.image_shape or len(images) == 0:
            expected = ", ".join(map(str, self.image_shape))
            raise ShapeError(f"the model takes images (n, {expected}); got {tuple(images.shape)}")
        if not torch.is_floating_point(images) or not ((images >= 0) & (images <= 1)).all():  # NaN is in no range
            raise ShapeError(
                f"images must be float in [0, 1]; got {images.dtype} in [{images.amin():g}, {images.amax():g}]: "
                "divide uint8 pixels by 255 and leave the normalization to the model"
            )
        if labels.shape != (len(images),) or labels.dtype != torch.int64:
            raise ShapeError(f"labels must be int64 ({len(images)},); got {labels.dtype} {tuple(labels.shape)}")
        if labels.amin() < 0 or labels.amax() >= self.n_classes:
            raise ShapeError(
                f"labels must lie in 0..{self.n_classes - 1}; got {int(labels.amin())}..{int(labels.amax())}: "
                "the model was trained on another set of classes"
            )


@dataclass(frozen=True)
class LocalTraining:
    """Several steps of an optimizer on the client's images per round (FedAvg); see `LocalSteps`.

    Args:
        steps: number of local steps; by default, unlike in `LocalSteps`, several: one step of SGD is a plain gradient,
            for which no local training has to be set.
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
