"""Full-batch training of a released model, as the victim does it and as an attacker repeats it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from lit_recon.errors import ConfigError

#: Weights by parameter name.
Weights = dict[str, Tensor]
#: Two classes with one output; classes with one output each; labels -1 and 1 as numbers.
Task = Literal["binary", "multiclass", "regression"]


def signs(labels: Tensor, like: Tensor) -> Tensor:
    """Labels 0 and 1 as -1 and 1, `(n,)`, of the dtype of `like`."""
    return labels.to(like) * 2 - 1


def losses(task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss `(n,)` of outputs `(n, k)`: logistic, cross-entropy, or squared; `k` is 1 but for `multiclass`."""
    if task == "multiclass":
        return F.cross_entropy(outputs, labels, reduction="none")
    signed = signs(labels, outputs)
    if task == "regression":
        return (outputs[:, 0] - signed).square()
    return F.softplus(-signed * outputs[:, 0])


def margins(task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
    """What the condition of stationarity weighs, `(n,)`: the margin of the label, or the output in regression."""
    if task == "multiclass":
        own = outputs.gather(1, labels[:, None])[:, 0]
        others = outputs.scatter(1, labels[:, None], -math.inf)
        return own - others.amax(dim=1)
    return outputs[:, 0] if task == "regression" else signs(labels, outputs) * outputs[:, 0]


def regularized_loss(
    task: Task, model: nn.Module, weights: Mapping[str, Tensor], images: Tensor, labels: Tensor, weight_decay: float
) -> Tensor:
    """The mean loss of images `(n, c, h, w)`, plus half the weight decay times the squared norm of all weights."""
    loss = losses(task, functional_call(model, dict(weights), (images,)), labels).mean()
    if weight_decay:
        loss = loss + weight_decay / 2 * sum(weight.square().sum() for weight in weights.values())
    return loss


@dataclass(frozen=True)
class Trained:
    """Weights after a training, their mean loss without weight decay, and the steps that it took."""

    weights: Weights
    loss: float
    steps: int


@dataclass(frozen=True)
class Training:
    """Gradient descent on all images at once.

    Args:
        task: loss and labels.
        steps: at most.
        lr: learning rate.
        momentum: of SGD.
        weight_decay: factor of half the squared norm of the weights in the objective.
        objective: `log_loss` descends on the logarithm of the mean loss. With small rates this is the same path as on
            the loss, and small losses, at which steps on the loss become tiny, are reached in thousands of steps
            instead of millions. Not together with weight decay or momentum.
        until: the training ends once its mean loss, without weight decay, is at most this.
    """

    task: Task = "binary"
    steps: int = 10_000
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    objective: Literal["loss", "log_loss"] = "loss"
    until: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.lr > 0 or not 0 <= self.momentum < 1 or min(self.weight_decay, self.until) < 0:
            raise ConfigError(
                "a training needs steps of 1 or more, lr above 0, momentum in [0, 1), weight_decay and until of "
                f"0 or more; got {self.steps}, {self.lr:g}, {self.momentum:g}, {self.weight_decay:g} and {self.until:g}"
            )
        if self.objective == "log_loss" and (self.weight_decay or self.momentum):
            raise ConfigError("objective log_loss is for trainings without weight decay and momentum: use loss")

    def run(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        start: Mapping[str, Tensor],
        advance: Callable[[float], None] = lambda loss: None,
    ) -> Trained:
        """Train from the weights `start`; `advance` is called with the loss after every step.

        A ConfigError says that the loss is no longer finite.
        """
        weights = {name: weight.detach().clone().requires_grad_() for name, weight in start.items()}
        speeds = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        step, loss = 0, math.inf
        while True:
            value = losses(self.task, functional_call(model, weights, (images,)), labels).mean()
            loss = float(value.detach())
            if not math.isfinite(loss):
                raise ConfigError(f"the training diverged at step {step}: its loss is {loss}; lower lr={self.lr:g}")
            if step == self.steps or loss <= self.until:
                break
            objective = value.log() if self.objective == "log_loss" else value
            gradients = torch.autograd.grad(objective, list(weights.values()))
            with torch.no_grad():
                for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
                    speeds[name].mul_(self.momentum).add_(gradient + self.weight_decay * weight)
                    weight.sub_(speeds[name], alpha=self.lr)
            step += 1
            advance(loss)
        return Trained({name: weight.detach() for name, weight in weights.items()}, loss, step)
