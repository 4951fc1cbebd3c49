"""Solvers: Adam, sign-Adam and L-BFGS, and the learning-rate schedules of the papers."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from lit_recon.errors import ConfigError

#: PyTorch cannot multiply float32 by numbers above 3e38, and Adam divides the rate by numbers far below 1.
_LARGEST_LR = 1e30


class Schedule(ABC):
    """Learning-rate factor as a function of the share of iterations done."""

    @abstractmethod
    def __call__(self, progress: float) -> float:
        """Factor at `progress` in [0, 1)."""


class StepDecay(Schedule):
    """Multiplies by `factor` at every milestone. Default: [Geiping2020], 3/8, 5/8 and 7/8 of the iterations."""

    def __init__(self, milestones: list[float] | None = None, factor: float = 0.1) -> None:
        self.milestones = sorted(milestones if milestones is not None else [3 / 8, 5 / 8, 7 / 8])
        self.factor = factor
        if any(not 0 < milestone < 1 for milestone in self.milestones):
            raise ConfigError(f"StepDecay needs milestones between 0 and 1 (shares of the run); got {self.milestones}")

    def __call__(self, progress: float) -> float:
        return float(self.factor ** bisect_right(self.milestones, progress))


class CosineDecay(Schedule):
    """Linear warm-up over a share of the iterations, then half a cosine down to `floor`."""

    def __init__(self, warmup: float = 0.0, floor: float = 0.0) -> None:
        if not 0 <= warmup < 1 or not 0 <= floor <= 1:
            raise ConfigError(f"CosineDecay needs warmup in [0, 1) and floor in [0, 1]; got {warmup:g} and {floor:g}")
        self.warmup, self.floor = warmup, floor

    def __call__(self, progress: float) -> float:
        if progress < self.warmup:
            return progress / self.warmup
        phase = (progress - self.warmup) / (1 - self.warmup)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * phase))


class Constant(Schedule):
    """No decay."""

    def __call__(self, progress: float) -> float:
        return 1.0


class TwoStages(Schedule):
    """One schedule run twice: up to `switch`, and with another learning rate after it.

    Args:
        switch: share of the iterations at which the second stage begins; equal to the parametrization's switch.
        factor: learning rate of the second stage over that of the first.
        schedule: of each stage; default: `StepDecay`.
    """

    def __init__(self, switch: float, factor: float, schedule: Schedule | None = None) -> None:
        if not 0 < switch < 1 or factor <= 0:
            raise ConfigError(
                f"TwoStages needs a switch between 0 and 1 (a share of the run) and a factor above 0; "
                f"got {switch:g} and {factor:g}"
            )
        self.switch, self.factor, self.schedule = switch, factor, schedule or StepDecay()

    def __call__(self, progress: float) -> float:
        if progress < self.switch:
            return self.schedule(progress / self.switch)
        return self.factor * self.schedule((progress - self.switch) / (1 - self.switch))


class Ended(Exception):  # noqa: N818 - no error
    """Raised where the loss is evaluated at variables that need no further steps."""


class Solver(ABC):
    """Makes an optimizer of one problem's variables and performs its iterations."""

    #: Whether one iteration evaluates the loss several times; problems then cannot be evaluated together.
    line_search: bool = False
    #: Whether the gradient of pixels is replaced by its sign.
    signed: bool = False

    def __init__(self, lr: float, schedule: Schedule | None = None) -> None:
        if not lr > 0:
            raise ConfigError(f"{type(self).__name__} needs a learning rate above 0; got {lr:g}")
        if lr > _LARGEST_LR:
            raise ConfigError(f"{type(self).__name__} needs a learning rate of at most {_LARGEST_LR:g}; got {lr:g}")
        self.lr = lr
        self.schedule = schedule or Constant()

    @abstractmethod
    def optimizer(self, variables: dict[str, Tensor]) -> torch.optim.Optimizer:
        """A fresh optimizer for the variables."""

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        variables: dict[str, Tensor],
        pixels: tuple[str, ...],
        progress: float,
        evaluate: Callable[[], Tensor],
    ) -> None:
        """One iteration at the share `progress` of all.

        `pixels` names the variables to which `signed` applies; `evaluate` fills the gradients and returns the loss. If
        it raises `Ended`, the iteration ends and the variables stay where it was called.
        """
        for group in optimizer.param_groups:
            group["lr"] = self.lr * self.schedule(progress)

        def closure() -> float:
            loss = float(evaluate())
            for name in variables.keys() & pixels if self.signed else ():
                gradient = variables[name].grad
                if gradient is not None:
                    gradient.sign_()
            return loss

        with contextlib.suppress(Ended):
            optimizer.step(closure)


class Adam(Solver):
    """Adam, by default on the sign of the gradient of pixels.

    Args:
        lr: step size in units of the variables: normalized pixels, or network weights.
        signed: replace the gradient of pixels by its sign before the moment estimates.
        betas: decay of the moment estimates.
        schedule: factor of the learning rate over the run; `StepDecay` by default.

    Source: [Geiping2020] (signed); [Liu2025], appendix F (unsigned).
    """

    def __init__(
        self,
        lr: float = 0.1,
        signed: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(lr, schedule or StepDecay())
        self.signed, self.betas = signed, betas

    def optimizer(self, variables: dict[str, Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(list(variables.values()), lr=self.lr, betas=self.betas)


class LBFGS(Solver):
    """L-BFGS; every iteration is up to `inner` quasi-Newton steps.

    Args:
        lr: step length, or the first trial step of the line search.
        inner: quasi-Newton steps per iteration.
        history: pairs kept for the Hessian's approximation.
        line_search: `strong_wolfe`, or `none` for fixed steps as in the public code of [Zhu2019].
        schedule: factor of `lr` over the run.

    Source: [Zhu2019].
    """

    line_search = True

    def __init__(
        self,
        lr: float = 1.0,
        inner: int = 20,
        history: int = 100,
        line_search: Literal["strong_wolfe", "none"] = "strong_wolfe",
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(lr, schedule)
        if inner < 1 or history < 1:
            raise ConfigError(f"LBFGS needs inner and history of at least 1; got {inner} and {history}")
        self.inner, self.history, self.search = inner, history, line_search

    def optimizer(self, variables: dict[str, Tensor]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(
            list(variables.values()),
            lr=self.lr,
            max_iter=self.inner,
            history_size=self.history,
            line_search_fn=None if self.search == "none" else self.search,
        )
