"""State of a running gradient matching: one problem per restart of every victim."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_recon.attacks.base import Curve
from lit_recon.attacks.updates.gradient_matching.matching import Matching
from lit_recon.attacks.updates.gradient_matching.parametrizations import Parametrization, Restart, Variables
from lit_recon.attacks.updates.gradient_matching.priors import Penalty
from lit_recon.solving import StepwiseLBFGS


class Within(NamedTuple):
    """A batch of which some images are sought: their numbers `(m,)`, all images `(n, c, h, w)`, and their penalty."""

    places: Tensor
    images: Tensor
    penalty: Penalty


@dataclass
class Problem:
    """One restart on one victim, or a search for some of its images: variables, optimizer and best iterate."""

    restart: Restart
    labels: Tensor
    variables: Variables
    optimizer: torch.optim.Optimizer | StepwiseLBFGS
    optimizer_of: Callable[[Variables], torch.optim.Optimizer]
    feature_penalty: Penalty | None = None
    feature_targets: Tensor | None = None
    order: Tensor | None = None  # `(n,)` of the images drawn; None: as they are
    kept: tuple[Tensor, Tensor] | None = None  # which images stay as they are, `(n,)` bool, and all images
    within: Within | None = None  # the batch of which it searches some images
    best_loss: float = float("inf")
    loss_before: float = float("inf")  # the least before the current iteration
    fell: float = float("inf")  # by how much every step of the last iteration lowered the least loss
    renews: bool = False  # every iteration begins with another penalty
    begun: int | None = None  # how many terms of the loss have started; None: no iteration has begun
    best_matching: float = float("inf")
    best_images: Tensor | None = None
    best_labels: Tensor | None = None
    diverged_at: int | None = None
    enough: float | None = None  # what the search goes on to; None: what its penalty says
    solved: bool = False  # nothing is left to search
    set_aside: bool = False
    trace: Curve = field(default_factory=dict)

    def images(self, parametrization: Parametrization) -> Tensor:
        """The candidates `(n, c, h, w)`, with those that are kept in their places; differentiable."""
        drawn = parametrization.images(self.variables, self.restart)
        drawn = drawn if self.order is None else drawn[self.order]
        return drawn if self.kept is None else torch.where(*self.kept, drawn)

    def as_drawn(self, images: Tensor) -> Tensor:
        """Candidates `(n, c, h, w)` in the order in which they were drawn, in which restarts have the same labels."""
        return images if self.order is None else images[self.order.argsort()]

    def move(self, variables: Variables) -> None:
        """Go on with other variables and a fresh optimizer."""
        self.variables = {name: value.detach().clone().requires_grad_() for name, value in variables.items()}
        self.optimizer = self.optimizer_of(self.variables)

    def exchange(self, order: Tensor) -> None:
        """Give the images, with their labels, another order `(n,)`."""
        self.order = order if self.order is None else self.order[order]
        self.labels = self.labels[order]
        # an image conditioned on a feature keeps it
        conditioned, targets = self.restart.features is not None, self.feature_targets
        self.feature_targets = targets[order] if conditioned and targets is not None else None

    def begin(self, steps: int) -> None:
        """Begin an iteration, the last of which had so many steps."""
        known = math.isfinite(self.loss_before)
        self.fell = (self.loss_before - self.best_loss) / steps if known else float("inf")
        self.loss_before = self.best_loss

    def begin_terms(self, progress: float, starts: Sequence[float]) -> None:
        """Begin an evaluation; the best iterate is sought anew once a penalty or a prior, by its share, has started."""
        penalty = self.feature_penalty
        begun = sum(start <= progress for start in (*starts, penalty.start if penalty else 0.0))
        if self.begun not in (None, begun):  # losses before lack a term
            self.best_loss = self.loss_before = float("inf")
        self.begun = begun

    def renew(self, parametrization: Parametrization, progress: float) -> None:
        """Begin an iteration with the penalty as it is for the candidates reached, if it depends on them."""
        penalty = self.feature_penalty
        if penalty is not None and (self.renews or penalty.renews(progress, self.fell)):
            self.feature_penalty = penalty.renewed(self.images(parametrization).detach())
            # losses before were another function's
            self.renews, self.best_loss = True, float("inf")

    @property
    def stepwise(self) -> StepwiseLBFGS | None:
        """The optimizer of a search for one image that shares its evaluations with others; None: it is another."""
        return self.optimizer if isinstance(self.optimizer, StepwiseLBFGS) else None

    def ended(self, progress: float) -> bool:
        """Whether it needs no iterations after a share of them: diverged, solved or stuck."""
        penalty = self.feature_penalty
        ended = penalty is not None and penalty.ended(self.best_loss, progress, self.fell, self.enough)
        if penalty and ended and not self.solved and self.best_images is not None and self.best_labels is not None:
            stricter = penalty.stricter(self.best_loss, self.best_images, self.best_labels)
            self.enough, self.solved = stricter or self.enough, stricter is None
            ended = self.solved
        still = self.stepwise is not None and self.stepwise.still
        return self.diverged_at is not None or ended or still

    def prior_share(self, progress: float) -> float:
        """What the priors count for at a share of the iterations."""
        return 1.0 if self.feature_penalty is None else self.feature_penalty.prior_share(progress)

    def feature_term(self, images: Tensor, progress: float) -> Tensor:
        """The penalty of recovered features, which are assigned to candidates when it starts."""
        penalty = self.feature_penalty
        if penalty is None or progress < penalty.start:
            return images.new_zeros(())
        if self.feature_targets is None:
            self.feature_targets = penalty.targets(images, self.labels if "labels" not in self.variables else None)
        return penalty.penalty(images, self.feature_targets, progress)

    def note(
        self, step: int, row: dict[str, float], images: Tensor, labels: Tensor, keep: bool, matches: bool, trace: bool
    ) -> None:
        """Store the iterate if it is the best or to `keep`, by the data term where it `matches`; and its `trace`."""
        loss, finite, lost = row["loss"], row.pop("finite"), row.pop("lost")
        finite = finite and math.isfinite(loss)
        # signs of an undefined direction are zero: the candidate would stay where it is without a word
        if self.diverged_at is None and (not finite or (lost and self.kept is None)):
            self.diverged_at = step
        if not finite:
            return
        if self.renews and math.isinf(self.best_loss):
            self.loss_before = loss  # the first one of a penalty that was renewed
        if loss < self.best_loss or keep:
            self.best_images = images.clone()
            self.best_labels = labels.argmax(-1) if "labels" in self.variables else labels
            self.best_matching = row["matching"] if matches else loss
        self.best_loss = min(self.best_loss, loss)
        if trace:
            for name, value in {"step": float(step), **row}.items():
                self.trace.setdefault(name, []).append(value)

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes while the attack runs."""
        fixed = ("restart", "optimizer", "optimizer_of", "feature_penalty", "kept", "within")
        changing = {name: value for name, value in vars(self).items() if name not in fixed}
        return {**changing, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of the same problem."""
        if state.keys() != self.state_dict().keys():
            raise ValueError("its parts are not those of this attack")
        changing = dict(state)
        variables = changing.pop("variables")
        if variables.keys() != self.variables.keys():
            self.move({name: value.to(self.labels.device) for name, value in variables.items()})
        for name, value in variables.items():
            self.variables[name].data.copy_(value)
        self.optimizer.load_state_dict(changing.pop("optimizer"))
        device = self.labels.device
        for name, value in changing.items():
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)


class Found(NamedTuple):
    """What the problems of a victim found: images `(n, c, h, w)`, labels `(n,)`, loss, its curve, and their penalty."""

    images: Tensor
    labels: Tensor
    loss: float
    trace: Curve
    penalty: Penalty | None

    @classmethod
    def by(cls, problems: Sequence[Problem]) -> Found | None:
        """Of the best restart, or of searches for some images each; None: its loss was never finite."""
        best = min((one for one in problems if not one.set_aside), key=lambda one: one.best_matching)
        within = best.within
        if within is None:
            if best.best_images is None or best.best_labels is None:
                return None
            return cls(best.best_images, best.best_labels, best.best_matching, best.trace, best.feature_penalty)
        images, found = within.images.clone(), [one for one in problems if one.best_images is not None]
        for one in found:
            if one.within is not None and one.best_images is not None:
                images[one.within.places] = one.best_images
        longest = max(problems, key=lambda one: len(one.trace.get("step", [])))
        return cls(images, best.labels, sum(one.best_matching for one in found), longest.trace, within.penalty)


@dataclass
class MatchingState:
    """A running attack.

    Attributes:
        problems: restarts of each victim in turn, or searches for parts of its images.
        matching: the data term.
        notes: of each victim.
        counts: number of problems of each victim.
        step: number of iterations done.
    """

    problems: list[Problem]
    matching: Matching
    notes: list[tuple[str, ...]]
    counts: list[int]
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        problems = [problem.state_dict() for problem in self.problems]
        return {"step": self.step, "execution": self.matching.execution, "problems": problems}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.matching.execution = state["step"], state["execution"]
        for problem, saved in zip(self.problems, state["problems"], strict=True):
            problem.load_state_dict(saved)

    @property
    def active(self) -> list[int]:
        """Numbers of the problems that are not set aside."""
        return [i for i, problem in enumerate(self.problems) if not problem.set_aside]

    @property
    def loss(self) -> float:
        """Mean of their lowest losses so far."""
        return sum(self.problems[i].best_loss for i in self.active) / len(self.active)

    @property
    def numbers_of_victims(self) -> list[range]:
        """Numbers of the problems of every victim."""
        return [range(first, last) for first, last in pairwise(accumulate(self.counts, initial=0))]

    @property
    def of_victims(self) -> list[list[Problem]]:
        """The problems of every victim."""
        return [[self.problems[i] for i in numbers] for numbers in self.numbers_of_victims]

    def narrow(self) -> None:
        """Stop all restarts of every victim except the one with the least matching loss so far."""
        for restarts in self.of_victims:
            best = min((p for p in restarts if not p.set_aside), key=lambda problem: problem.best_matching)
            for problem in restarts:
                problem.set_aside = problem is not best

    @property
    def curves(self) -> list[list[Curve]]:
        return [[problem.trace for problem in own] for own in self.of_victims]
