"""A gradient-matching attack in progress: all that changes from step to step, and can be saved and continued."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lit_recon.inversion.feature_matching import Pull
from lit_recon.inversion.map_matching import MapPull
from lit_recon.inversion.matching import Matching
from lit_recon.inversion.parametrizations import Variables
from lit_recon.records import Observation


@dataclass
class Problem:
    """One restart on one victim: its variables, its optimizer, and the best iterate that it has met."""

    observation: Observation
    labels: Tensor
    seed: int
    variables: Variables
    optimizer: torch.optim.Optimizer
    pull: Pull | MapPull | None = None
    condition: Tensor | None = None
    feature_targets: Tensor | None = None
    best_loss: float = float("inf")
    best_matching: float = float("inf")
    best_images: Tensor | None = None
    best_labels: Tensor | None = None
    diverged_at: int | None = None
    set_aside: bool = False
    trace: dict[str, list[float]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes while the attack runs."""
        fixed = ("observation", "seed", "optimizer", "pull", "condition")
        changing = {name: value for name, value in vars(self).items() if name not in fixed}
        return {**changing, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of the same problem."""
        for name, value in state["variables"].items():
            self.variables[name].data.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        device = self.labels.device
        for name in ("labels", "feature_targets", "best_images", "best_labels"):
            setattr(self, name, None if state[name] is None else state[name].to(device))
        for name in ("best_loss", "best_matching", "diverged_at", "set_aside", "trace"):
            setattr(self, name, state[name])


@dataclass
class InversionState:
    """A running attack: its problems (`r` restarts of each victim in turn), the data term, and the step count."""

    problems: list[Problem]
    matching: Matching
    notes: list[tuple[str, ...]]
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers, fit for `torch.save` and `torch.load(weights_only=True)`."""
        problems = [problem.state_dict() for problem in self.problems]
        return {"step": self.step, "execution": self.matching.execution, "problems": problems}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an attack with the same settings on the same observations."""
        self.step, self.matching.execution = state["step"], state["execution"]
        for problem, saved in zip(self.problems, state["problems"], strict=True):
            problem.load_state_dict(saved)

    @property
    def loss(self) -> float:
        """Mean, over problems that go on, of the lowest loss met so far."""
        losses = [problem.best_loss for problem in self.problems if not problem.set_aside]
        return sum(losses) / len(losses)
