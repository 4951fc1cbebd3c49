"""Interface of defenses.

A defense can change these stages of a client's round:

    model --prepare--> batch --transform_batch--> per-example gradients --transform_per_example--> mean
          --transform_update--> the released update, or the direction of the client's own optimizer step

An attacker who knows the defense applies `simulate_buffers`, `simulate_per_example` and `simulate` to the gradient of
a candidate.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError
from lit_recon.noisy_release import NoisyRelease
from lit_recon.records import Batch, BatchNormMode, Differentiable, Noise, Update

if TYPE_CHECKING:
    from lit_recon.bounds.fisher import Jacobian, ReleasedInformation

Buffers = Mapping[str, Tensor]
#: Relative difference, by rounding in single precision, of entries that were cut off at the same value.
TIED = 1e-5


class Stage(IntEnum):
    """Stages of a client's computation, in order of execution."""

    BATCH = 1
    PER_EXAMPLE = 2
    UPDATE = 3


class BatchGradient(Protocol):
    """Gradient of the mean loss over a batch by parameter name: a `ForwardOperator` at fixed weights."""

    def __call__(self, batch: Batch, differentiable: Differentiable = "no") -> Update: ...


class Round(NamedTuple):
    """The client's batch and its undefended gradient, for defenses that need them."""

    batch: Batch
    gradient: BatchGradient

    def single_gradients(self) -> list[Update]:
        """Those of every example alone."""
        return [self.gradient(self.batch.examples(i, i + 1)) for i in range(len(self.batch.images))]


class Defense:
    """No defense; a subclass overrides one or more of the methods `prepare` and `transform_*`.

    Methods do not modify their arguments. All random numbers come from the generator, in the order of the update's
    tensors. The object holds only settings, so that it can serve several clients and trainings, each argument of its
    constructor in an attribute of the same name; a constructor raises a `ConfigError` for a setting out of its range.

    >>> class SignOnly(Defense):
    ...     def transform_update(self, update, round_, generator):
    ...         return {name: value.sign() for name, value in update.items()}
    >>> SignOnly().stages
    (<Stage.UPDATE: 3>,)
    """

    #: Arguments for the strength, with their defaults, by which the defense changes nothing; empty if there are none.
    neutral: ClassVar[tuple[tuple[str, object], ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not isinstance(cls.__dict__.get("stages", Defense.stages), property):
            raise ConfigError(
                f"{cls.__name__}.stages cannot be set; it follows from the overridden transform_* methods: "
                "delete the attribute"
            )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages whose `transform_*` method is overridden, in order of execution."""
        methods = {stage: f"transform_{stage.name.lower()}" for stage in Stage}
        return tuple(
            stage for stage, name in methods.items() if getattr(type(self), name) is not getattr(Defense, name)
        )

    def prepare(self, model: nn.Module, batch_norm: BatchNormMode = "eval") -> nn.Module:
        """The global model as the client uses it, or an `UnsupportedModelError`; names and shapes do not change."""
        return model

    def transform_batch(self, batch: Batch, model: nn.Module, generator: torch.Generator) -> Batch:
        """The batch for the prepared `model`."""
        return batch

    def transform_per_example(self, gradients: Update, generator: torch.Generator) -> Update:
        """Gradients of single examples, each `(n, ...)`; no example may depend on another."""
        return gradients

    def example_factors(self, squared_norms: Tensor) -> Tensor | None:
        """The factors `(n,)` by which `transform_per_example` scales gradients of such norms; None if it does more.

        Trainings with them need no single gradients. They belong to the `transform_per_example` of the same class or a
        base of it: a subclass that overrides that method alone has none.
        """
        return None

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        """The mean gradient `update`, or the result of several local steps, as the client releases it."""
        return update

    def withholds(self, name: str) -> bool:
        """Whether the tensor of this name never leaves the client, so that a server leaves its own unchanged."""
        return False

    def simulate_buffers(self, buffers: Buffers, observed: Update, n_examples: int) -> Buffers:
        """Attacker's side of `prepare`: the model's buffers, estimated from the observed update."""
        return buffers

    def simulate_per_example(self, gradients: Update) -> Update:
        """Attacker's side of `transform_per_example`, for a candidate's gradients, each `(n, ...)`."""
        return gradients

    def simulate(self, candidate: Update, observed: Update) -> Update:
        """Attacker's side of `transform_update`: without noise, with masks taken from the observed update.

        Differentiable in `candidate`, and works under `torch.func.vmap`.
        """
        return candidate

    def censored(self, observed: Update) -> Update:
        """Masks of released entries that only bound the true ones: cut off at a largest absolute value, one by one."""
        return {name: torch.zeros_like(value, dtype=torch.bool) for name, value in observed.items()}

    def largest_hidden(self, observed: Update) -> dict[str, float]:
        """By tensor the largest magnitude of what this defense may have released as zero, in units of `observed`.

        0: it hides nothing, and at most scales all entries by one number; infinite: nothing is known, as for every
        defense that changes gradients and does not override this.
        """
        changed = bool({Stage.PER_EXAMPLE, Stage.UPDATE} & set(self.stages))
        return dict.fromkeys(observed, math.inf if changed else 0.0)

    def simulate_share(self, candidate: Update, observed: Update, clients: int) -> Update:
        """`simulate` for the update of one of several clients with this defense, whose mean is `observed`."""
        return self.simulate(candidate, observed)

    def require_shares(self) -> None:
        """Raise a `ConfigError` unless `simulate_share` is right for several clients.

        By default that is where `simulate` and `simulate_buffers` are not overridden: they may read properties of one
        client's release that the mean does not have.
        """
        if any(getattr(type(self), name) is not getattr(Defense, name) for name in ("simulate", "simulate_buffers")):
            raise ConfigError(
                f"an attacker who sees only the mean of several clients' updates cannot simulate {self}, which needs "
                "each client's own release: set knowledge.defense to false, or client.n_clients to 1"
            )

    def require_strength(self) -> None:
        """Raise a `ConfigError` where a configuration gives no strength, so that the defense changes nothing."""
        if self.neutral and all(getattr(self, name) == value for name, value in self.neutral):
            names = " or ".join(name for name, _ in self.neutral)
            raise ConfigError(f"{self} changes nothing: set its {names}, or leave the defense out")

    def released_std(self, n_examples: int) -> float:
        """Standard deviation of the Gaussian noise on every coordinate of the released update; 0 for no noise.

        The release is then normal, with the mean that `simulate_per_example` and `simulate` compute, as
        `lit_recon.bounds` needs. A `ConfigError` says why the release is not known to have this form.
        """
        if self.stages:
            raise ConfigError(f"no bound is known for {self}")
        return 0.0

    def released_noise(self, n_examples: int) -> Noise | None:
        """The noise on every released coordinate around the update that `simulate` computes, None without noise.

        A coordinate that is released as exactly zero counts as not released. A `ConfigError` says why the release is
        not known to have this form.
        """
        std = self.released_std(n_examples)
        return Noise("gaussian", std) if std else None

    def adds_noise(self, n_examples: int) -> bool:
        """Whether the defense adds noise to gradients or the update, or may, as far as is known."""
        if not {Stage.PER_EXAMPLE, Stage.UPDATE} & {*self.stages}:
            return False
        try:
            return self.released_noise(n_examples) is not None
        except ConfigError:
            return True

    @property
    def reads_zeros(self) -> bool:
        """Whether `simulate` takes from the zeros of the observed update which coordinates were dropped."""
        return False

    @property
    def drops_inputs(self) -> bool:
        """Whether it drops inputs of layers in the client's forward pass."""
        return False

    def without_noise(self) -> Defense:
        """The same defense without the noise of `released_std`."""
        return self

    def released_information(
        self, jacobian: Jacobian, round_: Round, std: float, generator: torch.Generator
    ) -> ReleasedInformation:
        """Fisher information about the inputs in a defended update; random masks and variances count as fixed.

        The `jacobian` is that of the undefended update at the inputs of the batch; the gradient of `round_` is of the
        loss summed over a batch. Normal noise of `std` is added if the defense has none. A `ConfigError` says that no
        closed form is known.
        """
        jacobian, release = self.linearized(jacobian, round_, generator)
        return jacobian.released(release.with_noise(std))

    def linearized(
        self, jacobian: Jacobian, round_: Round, generator: torch.Generator
    ) -> tuple[Jacobian, NoisyRelease]:
        """A Jacobian, and the release of its update that a defended client makes; arguments and errors as above."""
        if self.stages:
            raise ConfigError(f"no bound is known for {self}")
        return jacobian, NoisyRelease()

    def __repr__(self) -> str:
        """The call that builds it: also the key of its stored trainings, which unlike settings must not share."""
        names = inspect.signature(type(self)).parameters
        lost = [name for name in names if not hasattr(self, name)]
        if lost:
            raise ConfigError(
                f"{type(self).__name__} must keep each argument of its constructor in an attribute of the same name; "
                f"got none named {' or '.join(lost)}: set self.{lost[0]} = {lost[0]} in __init__"
            )
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def checked(
    owner: object, name: str, value: float, low: float = 0.0, high: float = math.inf, *, infinite: bool = False
) -> float:
    """`value`, or a `ConfigError` unless it lies in [low, high]; infinity only if `infinite`."""
    if value == math.inf and high == math.inf and not infinite:
        raise ConfigError(f"{type(owner).__name__} needs a finite {name}; got inf")
    if not low <= value <= high:
        nearest = high if value > high else low
        interval = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ConfigError(
            f"{type(owner).__name__} needs {name} {interval}; got {value:g}: the nearest valid choice is {nearest:g}"
        )
    return value


def positive(owner: object, name: str, value: float, *, infinite: bool = False) -> float:
    """`value`, or a `ConfigError` unless it is above 0; infinity only if `infinite`."""
    if value == 0:
        raise ConfigError(f"{type(owner).__name__} needs a positive {name}; got 0")
    return checked(owner, name, value, infinite=infinite)
