"""State of a running gradient matching: one problem per restart of every victim."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lit_recon.attacks.base import Curve
from lit_recon.attacks.updates.gradient_matching.matching import Matching
from lit_recon.attacks.updates.gradient_matching.parametrizations import Parametrization, Restart, Variables
from lit_recon.attacks.updates.gradient_matching.priors import Penalty


@dataclass
class Problem:
    """One restart on one victim: its variables, its optimizer and its best iterate."""

    restart: Restart
    labels: Tensor
    variables: Variables
    optimizer: torch.optim.Optimizer
    feature_penalty: Penalty | None = None
    feature_targets: Tensor | None = None
    kept: tuple[Tensor, Tensor] | None = None  # which images stay as they are, `(n,)` bool, and all images
    best_loss: float = float("inf")
    best_matching: float = float("inf")
    best_images: Tensor | None = None
    best_labels: Tensor | None = None
    diverged_at: int | None = None
    set_aside: bool = False
    trace: Curve = field(default_factory=dict)

    def images(self, parametrization: Parametrization) -> Tensor:
        """The candidates `(n, c, h, w)`, with those that are kept in their places; differentiable."""
        drawn = parametrization.images(self.variables, self.restart)
        return drawn if self.kept is None else torch.where(*self.kept, drawn)

    def ended(self, progress: float) -> bool:
        """Whether it needs no iterations after a share of them: diverged, solved or stuck."""
        ended = self.feature_penalty is not None and self.feature_penalty.ended(self.best_loss, progress)
        return self.diverged_at is not None or ended

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

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes while the attack runs."""
        fixed = ("restart", "optimizer", "feature_penalty", "kept")
        changing = {name: value for name, value in vars(self).items() if name not in fixed}
        return {**changing, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of the same problem."""
        if state.keys() != self.state_dict().keys():
            raise ValueError("its parts are not those of this attack")
        changing = dict(state)
        for name, value in changing.pop("variables").items():
            self.variables[name].data.copy_(value)
        self.optimizer.load_state_dict(changing.pop("optimizer"))
        device = self.labels.device
        for name, value in changing.items():
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)


@dataclass
class MatchingState:
    """A running attack: its problems (`r` restarts of each victim in turn), the data term, and notes per victim."""

    problems: list[Problem]
    matching: Matching
    notes: list[tuple[str, ...]]
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        problems = [problem.state_dict() for problem in self.problems]
        return {"step": self.step, "execution": self.matching.execution, "problems": problems}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.matching.execution = state["step"], state["execution"]
        for problem, saved in zip(self.problems, state["problems"], strict=True):
            problem.load_state_dict(saved)

    @property
    def going(self) -> list[int]:
        """Numbers of the problems that are not set aside."""
        return [i for i, problem in enumerate(self.problems) if not problem.set_aside]

    @property
    def loss(self) -> float:
        """Mean of their lowest losses so far."""
        return sum(self.problems[i].best_loss for i in self.going) / len(self.going)

    @property
    def restarts(self) -> int:
        """Restarts per victim."""
        return len(self.problems) // len(self.notes)

    @property
    def curves(self) -> list[list[Curve]]:
        traces, n = [problem.trace for problem in self.problems], self.restarts
        return [traces[first : first + n] for first in range(0, len(traces), n)]
