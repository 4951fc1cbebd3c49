"""Plans: everything that determines a set of shadow models, such as data, network, optimizer and seeds."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_recon.attacks.shadow.engine import (
    Execution,
    deltas,
    execution_of,
    fastest_execution,
    train_models,
    train_reference,
)
from lit_recon.attacks.shadow.steps import Batches
from lit_recon.attacks.shadow.store import ShadowStore
from lit_recon.attacks.shadow.training import GradientDescent, KnownTraining, flat_weights
from lit_recon.data import ImageSet, content_hash
from lit_recon.data.dataset import seeded_generator
from lit_recon.errors import ConfigError, ShapeError, UnsupportedModelError
from lit_recon.io.tensors import read_tensors
from lit_recon.models.released import ReleasedNetwork

#: Number of orders of mini-batches that the reference is the mean over, where the order is unknown.
_REFERENCE_ORDERS = 16
#: `known`: all models start from the same weights; `fresh`: each from weights of its own.
Initialization = Literal["known", "fresh"]


class Plan(Protocol):
    """How the adversary obtains shadow models: the interface of `ShadowPlan` and `LinearPlan`."""

    @property
    def fixed(self) -> ImageSet:
        """The fixed set."""

    @property
    def description(self) -> dict[str, object]:
        """Cache key: fields that must match to reuse stored models."""

    def execution(self) -> Execution:
        """The fastest way to train these models on this machine, measured."""

    def exact_sample(self, folder: Path, images: ImageSet) -> ExactSample | None:
        """Models to be trained before the first shard of the store in `folder` is computed; None: there are none."""

    def train_shards(self, store: ShadowStore, shards: Sequence[int], images: ImageSet) -> Iterator[int]:
        """Compute and store the models of some shards; yields each shard's number once it is stored."""

    def facts(self, folder: Path, n: int) -> Mapping[str, float | int | str]:
        """Entries in the record of a run with `n` of these models, stored in `folder`."""

    def notes(self, folder: Path, n: int) -> tuple[str, ...]:
        """Sentences for the reader of such a run."""


@dataclass(frozen=True, eq=False)
class ExactSample:
    """Models to be trained exactly, by which the error of an approximation is measured."""

    plan: ShadowPlan
    images: ImageSet  # one per model
    folder: Path  # of their store
    measure: Callable[[], None]  # measures the error on the stored models, and keeps it, unless it is known
    check: Callable[[], object]  # refuses an error that is too large
    falls_back: bool  # whether all models are trained exactly instead where the error is too large


@dataclass
class _Once:
    """A tensor that is computed when it is first asked for, and kept."""

    value: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ShadowPlan:
    """Models that are trained exactly and alike, each on the fixed set and one image of its own.

    A `ConfigError` says that the first mini-batches, in an order known to all, do not contain this image.
    """

    network: ReleasedNetwork
    fixed: ImageSet
    descent: GradientDescent
    seed: int = 0  # of the initial weights, of noise and of the order of mini-batches
    initialization: Initialization = "known"
    purpose: str = "shadow"  # of fresh weights, noise and unknown orders: released and shadow models draw their own
    device: str = "cpu"
    start: Tensor | None = None  # known initial weights `(p,)` instead of random ones, such as pre-trained ones
    _reference: _Once = field(default_factory=_Once, init=False, repr=False)  # a copy with changes has its own

    def __post_init__(self) -> None:
        self.require_own_image(self.descent.n_steps(len(self.fixed) + 1))

    def require_own_image(self, steps: int) -> None:
        """Raise a ConfigError if the first mini-batches, in an order known to all, do not contain a model's own image.

        Models released after so many steps would not depend on it.
        """
        n, size = len(self.fixed), self.descent.batch_size
        if size is None or self.descent.has_own_order or steps * size > n:
            return
        batches = islice(Batches(self.known, self.generators(range(1))).of(slice(0, 1)), steps)
        if not any(numbers is not None and (numbers == n).any() for numbers in batches):
            raise ConfigError(
                f"the first {steps} mini-batches of {size}, in the order of seed {self.seed}, do not contain the "
                f"unknown image: a model released then would not depend on it; take {-(-(n + 1) // size)} steps, an "
                "epoch, or more until the first release (descent.steps, descent.snapshots), or descent.order unknown"
            )

    @property
    def known(self) -> KnownTraining:
        """The training on this plan's device."""
        return KnownTraining(self.network, self.fixed.pixels(), self.fixed.labels, self.descent).on(self.device)

    @property
    def is_repeatable(self) -> bool:
        """Whether training is deterministic: equal images give equal models."""
        return self.initialization == "known" and not self.descent.is_noisy and not self.descent.has_own_order

    @property
    def description(self) -> dict[str, object]:
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
        """Initial weights `(p,)` drawn for a purpose; without one, the known ones."""
        if self.start is not None and not purpose:
            return self.start.clone()
        self.network.initialize(seeded_generator(self.seed, "initial weights", *purpose))
        return flat_weights(self.network)

    def reference(self) -> Tensor:
        """Float64 weights of the model trained on the fixed set alone, `(p,)`, or `(t * p,)` with snapshots."""
        # it takes as long as several models, and is asked for by every file of a store
        if self._reference.value is None:
            self._reference.value = self._trained_reference()
        return self._reference.value

    def for_purpose(self, purpose: str) -> ShadowPlan:
        """The same with noise, unknown orders and fresh weights of its own; the common reference is trained once."""
        return self._with_reference(dataclasses.replace(self, purpose=purpose))

    @property
    def without_noise(self) -> ShadowPlan:
        """The same clipping without noise; the common reference, which has no noise either, is trained once."""
        return self._with_reference(dataclasses.replace(self, descent=self.descent.without_noise))

    def _with_reference(self, other: ShadowPlan) -> ShadowPlan:
        object.__setattr__(other, "_reference", self._reference)
        return other

    def _trained_reference(self) -> Tensor:
        orders = None if self.descent.batch_size is None else [seeded_generator(self.seed, "order")]
        if self.descent.has_own_order:
            orders = [seeded_generator(self.seed, "order", "reference", order) for order in range(_REFERENCE_ORDERS)]
        return train_reference(self.known, self.initial_weights().to(self.device), orders).cpu()

    def execution(self) -> Execution:
        return fastest_execution(self.known, self.initial_weights().to(self.device))

    def starts(self, members: range) -> Tensor:
        """Initial weights `(p,)` of all models, or `(s, p)` if each has its own."""
        if self.initialization == "known":
            return self.initial_weights()
        return torch.stack([self.initial_weights(self.purpose, member) for member in members])

    def generators(self, members: range) -> list[torch.Generator] | None:
        """One generator per model for noise or an order of its own, one for a common order, or None."""
        if self.descent.is_noisy or self.descent.has_own_order:
            what = "noise" if self.descent.is_noisy else "order"
            return [seeded_generator(self.seed, what, self.purpose, member) for member in members]
        return None if self.descent.batch_size is None else [seeded_generator(self.seed, "order")]

    def train(self, images: ImageSet, members: range, execution: Execution, reference: Tensor) -> Tensor:
        """Differences `(s, p)` of some models from `reference()`, float32 on the CPU; `(s, t * p)` with snapshots.

        Of `images`, one per model of the whole plan, `members` are trained now; raises as `train_models` does.
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
        """Train and store the models of one shard."""
        members = store.members(shard, len(images))
        trained = self.train(images, members, execution_of(store.execution), reference)
        store.write(shard, trained, images.subset(torch.tensor(list(members))))

    def train_shards(self, store: ShadowStore, shards: Sequence[int], images: ImageSet) -> Iterator[int]:
        reference = self.reference()
        for shard in shards:
            if not store.is_complete(shard, len(images)):  # another process may have stored it meanwhile
                self.train_shard(store, shard, images, reference)
            yield shard

    def exact_sample(self, folder: Path, images: ImageSet) -> ExactSample | None:
        return None

    def facts(self, folder: Path, n: int) -> Mapping[str, float | int | str]:
        return {}

    def notes(self, folder: Path, n: int) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Pretraining:
    """All models start from known weights that were trained on other images, [Balle2022], appendix C and figure 13.

    Full batches; with the defaults, ReleasedMLP classifies 98 % of 10,000 training images of MNIST and 91 % of others.

    Args:
        images: number of images, taken from those in no part of the split.
        steps: of descent on them.
        lr, momentum: see `GradientDescent`.
    """

    images: int = 10_000
    steps: int = 500
    lr: float = 0.2
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.images < 1 or self.steps < 1 or not self.lr > 0 or not 0 <= self.momentum < 1:
            raise ConfigError(
                "initialization.images and initialization.steps must be at least 1, initialization.lr above 0 and "
                f"initialization.momentum in [0, 1); got {self.images}, {self.steps}, {self.lr} and {self.momentum}"
            )


def pretrained_weights(network: nn.Module, images: Tensor, labels: Tensor, how: Pretraining) -> Tensor:
    """Flat weights `(p,)`, float32 on the CPU, after a training from the network's own weights, which are not changed.

    Computed in float64, so that machines and numbers of threads hardly ever give different results: stored shadow
    models can be reused only if these weights are equal bit by bit. ConfigError if the training diverges.
    """
    trained, exact = copy.deepcopy(network).to(images.device, torch.float64), images.double()
    optimizer = GradientDescent(how.steps, how.lr, how.momentum).torch_optimizer(trained)
    with torch.enable_grad():
        for _ in range(how.steps):
            optimizer.zero_grad()
            F.cross_entropy(trained(exact), labels).backward()
            optimizer.step()
    weights = flat_weights(trained).float().cpu()
    if not torch.isfinite(weights).all():
        raise ConfigError(f"pre-training diverged to NaN or infinity: lower initialization.lr={how.lr:g}")
    return weights


def load_released(path: Path, network: nn.Module, n: int, n_snapshots: int = 1) -> Tensor:
    """Flat weights `(n, n_snapshots * p)` of `n` released models of one architecture, in their own precision.

    The safetensors file has the tensors of the network's `state_dict`, each with a leading axis of `n`, which may be
    left out for one model, or with leading axes `(n, n_snapshots)`. Snapshots include the final model.

    Raises:
        MissingDataError, CorruptFileError: there is no such file, or it is not a safetensors file.
        UnsupportedModelError, ShapeError: another architecture; another number of models, NaN or infinite weights.
    """
    tensors = read_tensors(path, "safetensors file of released models", "copy it there")
    wanted = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    if tensors.keys() != wanted.keys():
        raise UnsupportedModelError(
            f"{path} must hold the tensors {sorted(wanted)} of a {type(network).__name__}; got {sorted(tensors)}: "
            "set network to the architecture of the released models"
        )
    parts, leading = [], () if n_snapshots == 1 else (n_snapshots,)
    for name, shape in wanted.items():
        tensor, expected = tensors[name], leading + shape
        if n == 1 and tuple(tensor.shape) == expected:
            tensor = tensor[None]
        if tuple(tensor.shape[1:]) != expected:
            raise UnsupportedModelError(
                f"{path}: {name} must be (n, {', '.join(map(str, expected))}) for this architecture"
                f"{' and descent.snapshots' if leading else ''}; "
                f"got {tuple(tensor.shape)}: set network to the architecture of the released models"
            )
        if len(tensor) != n:
            raise ShapeError(f"{path} must hold one model per target, {n}; {name} has {len(tensor)}: set split.targets")
        if not torch.isfinite(tensor).all():
            raise ShapeError(f"{path}: {name} holds NaN or infinite weights: give another model")
        parts.append(tensor.reshape(n, n_snapshots, -1))
    return torch.cat(parts, dim=2).flatten(1)
