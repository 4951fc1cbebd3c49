"""Reconstruction by gradient descent through the training.

An informed adversary can repeat the training with any image in the place of the unknown one, and descend on the
distance of the trained from the released weights, differentiated with respect to the image's pixels. The derivative
follows the steps of the training backwards: it needs the weights before every step, and no other memory of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor
from torch.func import grad, vjp

from lit_recon.attacks.released.base import (
    Advance,
    Background,
    Improvement,
    ReconstructedTargets,
    Reconstructor,
    digest,
)
from lit_recon.attacks.released.kernel_ridge import KernelRidge
from lit_recon.attacks.released.retraining.repetition import repeatable, why_undetermined
from lit_recon.attacks.released.retraining.state import read_state, write_state
from lit_recon.attacks.shadow.training import KnownTraining, cross_entropy, full_precision
from lit_recon.errors import ConfigError

#: Decays of the running means of gradients and of their squares, as usual for Adam but for a shorter memory.
_MEAN, _SQUARE = 0.9, 0.99
#: Fixed images whose gradients are computed at a time.
_PIECE = 250
#: Steps between two writings of the state.
_KEPT = 5


@dataclass(frozen=True, eq=False)
class DescentState:
    """The search for one image `(c, h, w)` after some steps."""

    step: Tensor  # number of steps, int64 `()`
    image: Tensor  # to be evaluated next
    best: Tensor  # image whose weights come nearest
    least: Tensor  # their relative distance, `()`
    mean: Tensor  # running mean of gradients, of the image's shape
    square: Tensor  # running mean of their mean square, `()`

    @classmethod
    def of(cls, image: Tensor) -> DescentState:
        """Before the first step, from a first guess."""
        zero = image.new_zeros(())
        return cls(torch.zeros((), dtype=torch.int64), image, image, zero + math.inf, torch.zeros_like(image), zero)

    def next(self, distance: Tensor, gradient: Tensor, rate: float) -> DescentState:
        """After a step of Adam, of this size, given the image's distance and the gradient of the latter's square."""
        closer = bool(distance < self.least)
        step = int(self.step) + 1
        mean = _MEAN * self.mean + (1 - _MEAN) * gradient
        square = _SQUARE * self.square + (1 - _SQUARE) * gradient.square().mean()
        change = (mean / (1 - _MEAN**step)) / ((square / (1 - _SQUARE**step)).sqrt() + 1e-30)
        return DescentState(
            self.step + 1,
            (self.image - rate * change.nan_to_num()).clamp(0, 1),
            self.image if closer else self.best,
            distance if closer else self.least,
            mean,
            square,
        )

    def on(self, device: torch.device | str) -> DescentState:
        """With all of it on another device."""
        return DescentState(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass
class Retraining(Improvement):
    """Improve the guess of another reconstructor by descent on the distance of retrained from released weights.

    The optimizer is Adam with one mean square per image, so that pixels without a gradient do not move; the rate falls
    to 0 along half a cosine. The guess whose weights come nearest to the released ones is returned, with the label of
    the first guess. Networks may be of any kind. Where several images give the released weights, see
    `NewtonRetraining`, none is certified.

    Args:
        inner: makes the first guess; default: kernel ridge regression.
        steps: of descent; each takes about as long as four trainings.
        lr: initial step size, in units of a pixel's root mean square gradient.
        certain: relative distance below which an image counts as certified.

    Source: ours; for gradients through a training see Maclaurin, Duvenaud and Adams 2015.
    """

    inner: Reconstructor | None = None
    steps: int = 60
    lr: float = 0.02
    certain: float = 1e-2

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.lr > 0 or not 0 < self.certain < 1:
            raise ConfigError(f"steps must be at least 1, lr above 0 and certain between 0 and 1; got {self}")

    def prepare(self, background: Background) -> None:
        self.plan = repeatable(background.plan, "Retraining")
        self.folder, self.announce = background.state, background.announce
        self.undetermined = why_undetermined(self.plan)
        self.guess = (self.inner or KernelRidge()).bind(background)

    @property
    def notes(self) -> tuple[str, ...]:
        how = (
            f"Every first guess was improved by {self.steps} steps on the distance of retrained from released weights; "
            f"it is certified if they differ by at most {self.certain:g} of the image's effect on the weights."
        )
        return (*super().notes, how, *([f"No image is certified: {self.undetermined}"] if self.undetermined else []))

    def reconstruct(self, differences: Tensor) -> ReconstructedTargets:
        first = self.guess.reconstruct(differences)
        advance = self.announce(len(differences) * (self.steps + 1), "descent", "evaluations")
        found = [self._descend(*each, advance) for each in zip(first.images, first.labels, differences, strict=True)]
        images, distances = (torch.stack(parts) for parts in zip(*found, strict=True))
        certified = (distances <= self.certain) & (not self.undetermined)
        return ReconstructedTargets(images, first.labels, distances, certified)

    def _descend(self, start: Tensor, label: Tensor, released: Tensor, advance: Advance) -> tuple[Tensor, Tensor]:
        """The best image `(c, h, w)` for a released difference `(p,)`, and its relative distance, float64 `()`."""
        path, state = None, DescentState.of(start)
        if self.folder is not None:
            name = digest(f"{self.steps} {self.lr}", start, label, released)
            path = self.folder / f"descent_{name}.safetensors"
            state = read_state(path, DescentState) if path.is_file() else state
        advance(int(state.step))
        known, device = self.plan.known, self.plan.device
        initial = self.plan.initial_weights().to(device)
        wanted = (released.double() + self.plan.reference()).float().to(device)
        scale, label, state = released.norm().to(device), label.to(device), state.on(device)
        while int(state.step) <= self.steps:
            with full_precision(), torch.no_grad():
                weights = list(training_path(known, initial, state.image, label))
                left = (weights[-1] - wanted) / scale
                gradient = pulled_back(known, weights[:-1], state.image, label, 2 * left / scale)
            rate = self.lr * (1 + math.cos(math.pi * int(state.step) / self.steps)) / 2
            state = state.next(left.norm(), gradient, rate)
            advance(1)
            if path is not None and (int(state.step) % _KEPT == 0 or int(state.step) > self.steps):
                write_state(path, state.on("cpu"))
        return state.best.cpu(), state.least.double().cpu()


def training_path(known: KnownTraining, initial: Tensor, image: Tensor, label: Tensor) -> Iterator[Tensor]:
    """Weights `(p,)` before the first and after each step of the training on the fixed set and an image."""
    descent, of_sum = known.descent, _summed_gradient(known)
    weights, speed = initial, torch.zeros_like(initial)
    yield weights
    for _ in range(descent.steps):
        total = sum(
            (of_sum(weights, *some) for some in _pieces(known)), start=of_sum(weights, image[None], label[None])
        )
        speed = descent.momentum * speed + total / (len(known.images) + 1)
        weights = weights - descent.lr * speed
        yield weights


def pulled_back(known: KnownTraining, weights: list[Tensor], image: Tensor, label: Tensor, covector: Tensor) -> Tensor:
    """Derivative in the image of the product of the trained weights with a covector `(p,)`, of the image's shape.

    `weights` are those before each step, of `training_path`.
    """
    descent, of_sum, n = known.descent, _summed_gradient(known), len(known.images) + 1
    of_weights, of_speed, slope = covector, torch.zeros_like(covector), torch.zeros_like(image)
    for before in reversed(weights):
        of_gradient = of_speed - descent.lr * of_weights
        own = vjp(lambda at, place: of_sum(at, place[None], label[None]), before, image)[1]
        curvature, moved = own(of_gradient / n)
        slope = slope + moved
        for images, labels in _pieces(known):
            fixed = vjp(partial(of_sum, images=images, labels=labels), before)[1]
            curvature = curvature + fixed(of_gradient / n)[0]
        of_weights, of_speed = of_weights + curvature, descent.momentum * of_gradient
    return slope


def _summed_gradient(known: KnownTraining) -> Callable[..., Tensor]:
    """Gradient `(p,)` of the loss summed over images, given weights, images and labels."""

    def gradient(weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = grad(partial(cross_entropy, known.network, reduction="sum"))(weights, images, labels)
        return found

    return gradient


def _pieces(known: KnownTraining) -> Iterator[tuple[Tensor, Tensor]]:
    """Some of the fixed images and their labels at a time."""
    return zip(known.images.split(_PIECE), known.labels.split(_PIECE), strict=True)
