"""Images whose training gives the released weights: bilevel attacks on a whole training set.

Minimized over the images is the distance between the released weights and those that a training on the images gives;
[Runkel2024] compares this formulation with the condition of stationarity.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad

from lit_recon.attacks.base import SimpleState
from lit_recon.attacks.shadow.training import unflatten
from lit_recon.attacks.trainset.base import Candidates, ReleasedModel, TrainsetAttack
from lit_recon.attacks.trainset.inner import (
    InnerProblem,
    drawn_weights,
    implicit_gradient,
    is_linear_in_weights,
    need_change,
    newton,
)
from lit_recon.attacks.trainset.training import Training
from lit_recon.defenses.vectors import flatten
from lit_recon.errors import ConfigError, ThreatModelError, UnsupportedModelError
from lit_recon.records import Reconstruction


@dataclass
class Bilevel(TrainsetAttack):
    """Descent on the distance of the released weights from those that training on the candidates gives.

    Adam with a rate that falls to 0 along half a cosine, on images that are projected into [0, 1] after every step.
    The images with the smallest objective are returned; their loss is its root, the relative distance. Known training
    images are part of every training; each counts as often as there are candidates for each unknown image. Every step
    notes the relative `distance` of the weights and the `residual`: the norm of the gradient of their regularized loss
    at the released weights.

    Args:
        steps: of descent on the images.
        lr: initial rate of Adam, in units of the range of pixels.

    Source: [Runkel2024], equation (1); how its inner problem is differentiated is not known.
    """

    steps: int = 500
    lr: float = 0.02

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.lr > 0:
            raise ConfigError(f"steps must be at least 1 and lr above 0; got {self.steps} and {self.lr:g}")

    def check(self, start: Candidates) -> None:
        start.seen.repeats_of_known(start.n_examples)

    def _need_minimum(self, seen: ReleasedModel) -> None:
        """Refuse trainings whose weights are no minimum of the regularized loss of all images, as far as is known."""
        if not seen.weight_decay:
            raise ThreatModelError(
                f"implicit differentiation needs the weight decay of the training, above 0, without which the loss has "
                f"no minimum; it is {'unknown' if seen.weight_decay is None else '0'}: give it, or use UnrolledBilevel"
            )
        _refuse_dp(seen)
        if seen.training is not None and (parts := seen.training.parts) > 1:
            raise ThreatModelError(
                f"{type(self).__name__} takes the weights for a minimum of the loss of all images, but those of a "
                f"training in {parts} parts come from the last part alone: attack a training without parts, or use "
                "UnrolledBilevel"
            )

    @abstractmethod
    def origin(self, start: Candidates) -> Tensor:
        """Weights `(p,)` at which simulated trainings begin and from which changes of weights are counted."""

    @abstractmethod
    def trained(self, problem: InnerProblem, images: Tensor, last: Tensor) -> Tensor:
        """The weights `(p,)` that training on images `(m, c, h, w)` gives.

        `last` `(p,)` is what a training on similar images ended with, or the origin.
        """

    @abstractmethod
    def descent(self, problem: InnerProblem, images: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """The trained weights `(p,)`, and the gradient `(m, c, h, w)` of the objective in the images."""

    def objective(self, problem: InnerProblem, vector: Tensor) -> Tensor:
        """What is minimized, of trained weights `(p,)`: the square of `InnerProblem.distance`."""
        return (vector - problem.released).square().sum() / (problem.released - problem.origin).square().sum()

    def problem(self, start: Candidates, origin: Tensor | None = None) -> InnerProblem:
        """The inner problem of these candidates; with `origin` from an earlier call where it is known."""
        seen, like = start.seen, start.like
        labels, decay = start.labels.to(like.device), seen.weight_decay or 0.0
        origin = self.origin(start) if origin is None else origin
        return InnerProblem(seen, labels, decay, flatten(seen.weights).to(like), origin)

    def init(self, start: Candidates) -> SimpleState:
        images, origin = start.images.detach().to(start.like).clone().clamp(0, 1), self.origin(start)
        return SimpleState(
            [start],
            origin=origin,
            last=origin.clone(),
            images=images,
            optimizer=torch.optim.Adam([images], lr=self.lr),
            best=images.clone(),
            best_objective=math.inf,
            best_distance=math.inf,
        )

    def step(self, state: SimpleState) -> None:
        [start] = state.observations
        images, optimizer = state["images"], state["optimizer"]
        problem = self.problem(start, state["origin"])
        vector, gradient = self.descent(problem, images, state["last"])
        objective, distance = float(self.objective(problem, vector)), problem.distance(vector)
        if not math.isfinite(objective):
            raise ConfigError(
                f"the simulated training diverged at step {state.step} of the attack: its weights are not finite; its "
                "learning rate is too large for these candidates"
            )
        state["last"].copy_(vector)
        if objective < state["best_objective"]:
            state["best"].copy_(images)
            state["best_objective"], state["best_distance"] = objective, distance
        residual = float(problem.gradient(problem.released, images).norm())
        with torch.no_grad():
            for group in optimizer.param_groups:
                group["lr"] = self.lr * (1 + math.cos(math.pi * state.step / self.steps)) / 2
            images.grad = gradient
            optimizer.step()
            images.clamp_(0, 1)
        state.note([objective], distance=[distance], residual=[residual])

    def result(self, state: SimpleState) -> Reconstruction:
        [start] = state.observations
        return Reconstruction(state["best"], start.labels, state["best_distance"])


@dataclass
class ImplicitBilevel(Bilevel):
    """Bilevel attack on networks that are linear in their weights, trained with weight decay until convergence.

    The inner problem is strongly convex: the trained weights are its only minimum, whatever the start, and their
    derivative follows from the implicit function theorem. Distances are relative to the norm of the released weights.
    Trainings that are known to have `dp` or `parts` are refused.

    Args:
        tolerance: relative, of the trained weights and of the linear systems.
    """

    lr: float = 0.05
    tolerance: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.tolerance < 1:
            raise ConfigError(f"tolerance must be above 0 and below 1; got {self.tolerance:g}")

    def check(self, start: Candidates) -> None:
        super().check(start)
        self._need_minimum(start.seen)
        if not is_linear_in_weights(start.seen):
            raise UnsupportedModelError(
                f"ImplicitBilevel needs a network whose outputs are linear in its weights, as affine ones are; those "
                f"of this {type(start.seen.model).__name__} are not, and its training has several minima: use "
                "UnrolledBilevel or DampedBilevel"
            )

    def origin(self, start: Candidates) -> Tensor:
        return torch.zeros_like(flatten(start.seen.weights))

    def trained(self, problem: InnerProblem, images: Tensor, last: Tensor) -> Tensor:
        return newton(problem, images, last, self.tolerance)

    def descent(self, problem: InnerProblem, images: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        vector = self.trained(problem, images, last)
        slope = grad(lambda weights: self.objective(problem, weights))(vector)
        return vector, implicit_gradient(problem, images, vector, slope, tolerance=self.tolerance)


@dataclass
class UnrolledBilevel(Bilevel):
    """Bilevel attack by differentiation through a simulated training.

    The training is the known one, from the known start or else from drawn weights, and may have `parts`: candidates are
    then as many as unknown images, and in their order. One with `dp` is refused. Distances are relative to the change
    of the weights from that start.

    Args:
        steps_inner: of the simulated training, at least its `parts`; None: as many as the known one takes at most.
        distance: `l2`: the squared relative distance of the weights; `cosine`: one minus the cosine of the angle
            between simulated and true change of the weights, which is then the loss, too.
        segment: steps of the training whose graph is in memory at a time; None: the root of their number.

    Source: [Maclaurin2015]; [Runkel2024] for its use against training sets.
    """

    lr: float = 0.02
    steps_inner: int | None = None
    distance: Literal["l2", "cosine"] = "l2"
    segment: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = [count for count in (self.steps_inner, self.segment) if count is not None]
        if min(counts, default=1) < 1 or self.distance not in ("l2", "cosine"):
            raise ConfigError(
                "steps_inner and segment must be at least 1 (or None) and distance l2 or cosine; got "
                f"{self.steps_inner}, {self.segment} and {self.distance}"
            )

    def check(self, start: Candidates) -> None:
        super().check(start)
        training, n = _known_training(start.seen), start.seen.n_unknown
        steps = self.steps_inner or training.steps
        if training.parts > 1 and (start.n_examples != n or steps < training.parts):
            raise ThreatModelError(
                f"a training in {training.parts} parts is simulated in at least as many steps, with one candidate for "
                f"each of the {n} unknown images; got {steps} steps and {start.n_examples} candidates: give {n} "
                f"candidates, and steps_inner None or at least {training.parts}"
            )

    def origin(self, start: Candidates) -> Tensor:
        return _origin(start)

    def objective(self, problem: InnerProblem, vector: Tensor) -> Tensor:
        if self.distance == "cosine":
            own, true = vector - problem.origin, problem.released - problem.origin
            apart: Tensor = 1 - own.dot(true) / (own.norm() * true.norm())
            return apart
        return super().objective(problem, vector)

    def result(self, state: SimpleState) -> Reconstruction:
        found = super().result(state)
        return found if self.distance == "l2" else replace(found, loss=state["best_objective"])

    def trained(self, problem: InnerProblem, images: Tensor, last: Tensor) -> Tensor:
        training = _known_training(problem.seen)
        steps = self.steps_inner or training.steps
        return _repeated(problem, training, images, problem.origin, steps, self.segment or math.isqrt(steps))

    def descent(self, problem: InnerProblem, images: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        images = images.detach().clone().requires_grad_()
        vector = self.trained(problem, images, last)
        # Checkpoints allow derivatives by `backward` alone.
        self.objective(problem, vector).backward()
        assert images.grad is not None
        return vector.detach(), images.grad


@dataclass
class DampedBilevel(Bilevel):
    """Bilevel attack on any network, which takes the trained weights for a minimum of the regularized loss.

    The derivative is that of the implicit function theorem, with a multiple of the identity added to the Hessian, as
    far as conjugate gradients meet no direction of negative curvature. Trainings begin at the known start or else at
    drawn weights; distances are relative to the change of the weights from there. Known trainings with `dp` or `parts`
    are refused.

    Args:
        damping: added to the eigenvalues of the Hessian.
        steps_inner: of the training; None: as many as the known one takes at most.
        warm: trainings after the first go on from the last weights: faster, and right for weights released near a
            minimum; others move on even with the true images.
        steps_warm: of a training that goes on.
        cg_steps: of conjugate gradients, at most.
    """

    lr: float = 0.02
    damping: float = 1e-3
    steps_inner: int | None = None
    warm: bool = True
    steps_warm: int = 20
    cg_steps: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            min(1 if self.steps_inner is None else self.steps_inner, self.steps_warm, self.cg_steps) < 1
            or not self.damping >= 0
        ):
            raise ConfigError(
                "steps_inner (or None), steps_warm and cg_steps must be at least 1 and damping at least 0; got "
                f"{self.steps_inner}, {self.steps_warm}, {self.cg_steps} and {self.damping:g}"
            )

    def check(self, start: Candidates) -> None:
        super().check(start)
        self._need_minimum(start.seen)
        _known_training(start.seen)

    def origin(self, start: Candidates) -> Tensor:
        return _origin(start)

    def trained(self, problem: InnerProblem, images: Tensor, last: Tensor) -> Tensor:
        training = _known_training(problem.seen)
        again = self.warm and not torch.equal(last, problem.origin)
        steps = self.steps_warm if again else self.steps_inner or training.steps
        with torch.no_grad():
            return _repeated(problem, training, images, last if again else problem.origin, steps)

    def descent(self, problem: InnerProblem, images: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        vector = self.trained(problem, images, last)
        slope = grad(lambda weights: self.objective(problem, weights))(vector)
        return vector, implicit_gradient(problem, images, vector, slope, self.damping, 1e-6, self.cg_steps)


def _origin(start: Candidates) -> Tensor:
    seen = start.seen
    return flatten(drawn_weights(seen, start.seed) if seen.start is None else seen.start).to(start.like)


def _repeated(
    problem: InnerProblem, training: Training, images: Tensor, start: Tensor, steps: int, segment: int = 0
) -> Tensor:
    """The weights `(p,)` after `steps` of the training, on these images and those that are known."""
    training, model = replace(training, steps=steps), problem.seen.model
    return flatten(training.unrolled(model, *problem.examples(images), unflatten(model, start), segment))


def _known_training(seen: ReleasedModel) -> Training:
    if seen.training is None:
        raise ThreatModelError(
            "the training is simulated with its learning rate, momentum, weight decay and number of steps, which are "
            "unknown: give them (`training`), or use ImplicitBilevel on a network without hidden layers"
        )
    _refuse_dp(seen)
    need_change(seen)
    return seen.training


def _refuse_dp(seen: ReleasedModel) -> None:
    if seen.training is not None and seen.training.dp is not None:
        raise ThreatModelError(
            "a training with dp cannot be simulated: its clipping and noise are not; attack a training without dp"
        )
