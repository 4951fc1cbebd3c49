"""What a defense is: stages between a client's batch and its update, each doing nothing unless a defense says so.

A round runs through them in this order, whatever the order in which defenses are listed:

    model --prepare--> batch --transform_batch--> per-example gradients --transform_per_example--> mean
          --transform_update--> what the client releases, or what its own optimizer steps along

The attacker has a counterpart of each stage that he can simulate: what it does to a candidate's gradient.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lit_recon.errors import ConfigError
from lit_recon.models import Backbone
from lit_recon.records import Update

BatchNormMode = Literal["eval", "train"]


class Stage(IntEnum):
    """Where a defense acts within a round, in the order of time."""

    BATCH = 1
    PER_EXAMPLE = 2
    UPDATE = 3


class Batch(NamedTuple):
    """A client's batch.

    Attributes:
        images: `(n, c, h, w)` in [0, 1].
        labels: classes `(n,)` or probabilities `(n, k)`.
        masks: buffers of the model that differ from example to example, by name, each `(n, ...)`.
    """

    images: Tensor
    labels: Tensor
    masks: Mapping[str, Tensor] = {}

    def examples(self, start: int, stop: int) -> Batch:
        """Examples `start` to `stop - 1`."""
        masks = {name: mask[start:stop] for name, mask in self.masks.items()}
        return Batch(self.images[start:stop], self.labels[start:stop], masks)


class BatchGradient(Protocol):
    """Gradient of the mean loss over a batch by parameter name, at fixed weights.

    `create_graph` keeps it differentiable; `functional` differentiates by `torch.func`, for use inside its transforms.
    """

    def __call__(self, batch: Batch, *, create_graph: bool = False, functional: bool = False) -> Update: ...


class Round(NamedTuple):
    """What a defense of the update may ask about where it came from: the batch, and the undefended gradient."""

    batch: Batch
    gradient: BatchGradient


class Defense:
    """The identity; a defense overrides the stages in which it acts and lists them in `stages`.

    Every stage returns new values and leaves its arguments untouched. All random numbers come from the generator, in
    the order of the update's tensors. The object itself holds settings only, so that one object serves any number of
    clients and trainings.

    Attributes:
        stages: where the defense acts; `prepare` aside.
    """

    stages: tuple[Stage, ...] = ()

    def prepare(self, model: Backbone, batch_norm: BatchNormMode = "eval") -> Backbone:
        """The model that the client runs, with the parameters' names and shapes unchanged.

        Args:
            model: as the server sent it.
            batch_norm: whether its BatchNorm layers will run with running (`eval`) or batch statistics (`train`).

        Raises:
            UnsupportedModelError: the defense cannot work on this model.
        """
        return model

    def transform_batch(self, batch: Batch, model: Backbone, generator: torch.Generator) -> Batch:
        """The batch that the prepared `model` is run on."""
        return batch

    def transform_per_example(self, gradients: Update, generator: torch.Generator) -> Update:
        """Gradients of single examples, each `(n, ...)`; no example may depend on another."""
        return gradients

    def transform_update(self, update: Update, round_: Round, generator: torch.Generator) -> Update:
        """The mean gradient, or the update of several local steps."""
        return update

    def simulate_buffers(
        self, buffers: Mapping[str, Tensor], observed: Update, n_examples: int
    ) -> Mapping[str, Tensor]:
        """The buffers of the prepared model as an attacker who has seen `observed` should set them."""
        return buffers

    def simulate_per_example(self, gradients: Update) -> Update:
        """What the defense does to a candidate's gradients of single examples, each `(n, ...)`."""
        return gradients

    def simulate(self, candidate: Update, observed: Update) -> Update:
        """What the defense would have done to a candidate's update, as far as `observed` tells.

        Differentiable in `candidate`, and fit for `torch.func.vmap`.
        """
        return candidate

    def log_likelihood(self, candidate: Update, observed: Update, n_examples: int) -> Tensor | None:
        """Log density of `observed` given the candidate's update after `simulate`; None if there is none to give.

        A scalar, differentiable in `candidate`.
        """
        return None

    def __repr__(self) -> str:
        names = inspect.signature(type(self)).parameters
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def checked(owner: object, name: str, value: float, low: float = 0.0, high: float = math.inf) -> float:
    """`value`, if it lies in [low, high].

    Raises:
        ConfigError: it does not, or is not a number.
    """
    if not low <= value <= high:
        nearest = high if value > high else low
        interval = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ConfigError(
            f"{type(owner).__name__} needs {name} {interval}; got {value:g}: the nearest valid choice is {nearest:g}"
        )
    return value


def checked_finite(owner: object, name: str, value: float) -> float:
    """`value`, if it is finite and not negative.

    Raises:
        ConfigError: it is not.
    """
    if value == math.inf:
        raise ConfigError(f"{type(owner).__name__} needs a finite {name}; got inf")
    return checked(owner, name, value)
