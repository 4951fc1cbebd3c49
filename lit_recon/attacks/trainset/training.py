"""Full-batch training of a released model, as the victim does it and as an attacker repeats it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_recon.defenses import DPSGD
from lit_recon.defenses.release import update_of_batch
from lit_recon.errors import ConfigError
from lit_recon.privacy.noisy_sgd import PrivateDescent
from lit_recon.records import Batch, Differentiable, Update

#: Examples whose gradients are computed at once where each is clipped; they need the memory of so many models.
_CLIPPED_AT_ONCE = 16

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


def named_labels(task: Task, outputs: Tensor) -> Tensor:
    """The labels `(n,)` that outputs `(n, k)` name; without several classes, an output of 0 names the label 0."""
    return outputs.argmax(dim=1) if task == "multiclass" else (outputs[:, 0] > 0).long()


def accuracy(task: Task, outputs: Tensor, labels: Tensor) -> float:
    """Share, in [0, 1], of the outputs `(n, k)` that name their label."""
    return float((named_labels(task, outputs) == labels).double().mean())


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

    A training on fewer steps (early stopping), with weight decay, `dp` or `parts` is a defense of its images.

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
        dp: clipping of every image's gradient, and noise; default: none. The guarantee is for known `n`, and not
            together with `log_loss` or `until`, which read the loss.
        parts: sample splitting: the images are split at random, with a fixed seed, into so many disjoint parts of equal
            size (up to one image); the steps into as many phases of equal length, each on one part only. The final
            weights are then stationary for the last part alone. Not together with `until`.

    Source: [Abadi2016], algorithm 1, for `dp`; `parts` is ours.
    """

    task: Task = "binary"
    steps: int = 10_000
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    objective: Literal["loss", "log_loss"] = "loss"
    until: float = 0.0
    dp: PrivateDescent | None = None
    parts: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.lr > 0 or not 0 <= self.momentum < 1 or min(self.weight_decay, self.until) < 0:
            raise ConfigError(
                "a training needs steps of at least 1, lr above 0, momentum in [0, 1), weight_decay and until of at "
                f"least 0; got {self.steps}, {self.lr:g}, {self.momentum:g}, {self.weight_decay:g} and {self.until:g}"
            )
        if self.objective == "log_loss" and (self.weight_decay or self.momentum):
            raise ConfigError("objective log_loss is for trainings without weight decay and momentum: use loss")
        if self.dp is not None and (self.objective == "log_loss" or self.until):
            raise ConfigError(
                "the guarantee of dp does not cover the loss, which log_loss divides by and until waits for: take "
                "objective loss and until 0"
            )
        if not 1 <= self.parts <= self.steps or (self.parts > 1 and self.until):
            raise ConfigError(
                f"parts must be 1 to steps={self.steps}, without until, which could leave parts unused; got "
                f"{self.parts} and until={self.until:g}"
            )

    @property
    def epsilon(self) -> float:
        """Of the released weights at `dp.delta`; infinite without noise. An image is used in one part's steps only."""
        return math.inf if self.dp is None else self.dp.epsilon(self._steps_per_part)

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum of clipped gradients, over the clipping norm."""
        return 0.0 if self.dp is None else self.dp.noise(self._steps_per_part)

    @property
    def _steps_per_part(self) -> int:
        """The most steps of any part."""
        return -(-self.steps // self.parts)

    def part(self, step: int, n: int) -> Tensor | slice:
        """Positions, among `n` images, of those that a step is on."""
        if self.parts == 1 or step == self.steps:
            return slice(None)
        return self.split(n)[step * self.parts // self.steps]

    def split(self, n: int) -> tuple[Tensor, ...]:
        """Positions, among `n` images, of those in every part."""
        return torch.randperm(n, generator=torch.Generator().manual_seed(0)).tensor_split(self.parts)

    def run(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        start: Mapping[str, Tensor],
        advance: Callable[[float], None] = lambda loss: None,
        generator: torch.Generator | None = None,
        left_out: int = 0,
    ) -> Trained:
        """Train from the weights `start`.

        Without the last `left_out` images of the training, each step is on the others of its part. `advance` is called
        after every step with the loss before it, of the images that the step is on; the generator draws the noise. A
        ConfigError says that the loss is no longer finite, that there are fewer images than parts, or that noise has no
        generator; an UnsupportedModelError that gradients of single images cannot be clipped.
        """
        if len(images) < self.parts:
            raise ConfigError(f"{len(images)} images cannot be split into {self.parts} parts: take fewer parts")
        weights = {name: weight.detach().clone().requires_grad_() for name, weight in start.items()}
        speeds = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        private = None if self.dp is None else self._private_gradient(model, weights, generator)
        step, loss = 0, math.inf
        while True:
            used = self.part(step, len(images) + left_out)
            used = used[used < len(images)] if isinstance(used, Tensor) else used
            own = Batch(images[used], labels[used])
            value = losses(self.task, functional_call(model, weights, (own.images,)), own.labels).mean()
            loss = float(value.detach())
            if not math.isfinite(loss):
                raise ConfigError(f"the training diverged at step {step}: its loss is {loss}; lower lr={self.lr:g}")
            if step == self.steps or loss <= self.until:
                break
            if private is None:
                objective = value.log() if self.objective == "log_loss" else value
                gradients = torch.autograd.grad(objective, list(weights.values()))
            else:
                gradients = tuple(private(own).values())
            with torch.no_grad():
                for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
                    speeds[name].mul_(self.momentum).add_(gradient + self.weight_decay * weight)
                    weight.sub_(speeds[name], alpha=self.lr)
            step += 1
            advance(loss)
        return Trained({name: weight.detach() for name, weight in weights.items()}, loss, step)

    def unrolled(
        self, model: nn.Module, images: Tensor, labels: Tensor, start: Mapping[str, Tensor], segment: int = 0
    ) -> Weights:
        """The weights of `run` without `dp`, differentiable in the images.

        Args:
            model, images, labels, start: as for `run`.
            segment: steps whose graph is in memory at a time (checkpointing; then differentiable by `backward` alone);
                0: all.
        """
        if self.dp is not None:
            raise ConfigError("a training with dp cannot be repeated: leave dp out")

        def objective(weights: Weights, own: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
            value = losses(self.task, functional_call(model, weights, (own,)), marks).mean()
            return (value.log() if self.objective == "log_loss" else value), value.detach()

        descend = grad(objective, has_aux=True)

        def go_on(first: int, candidates: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
            """Weights and speeds after the steps of a segment; once the loss is low enough they stay as they are."""
            weights, speeds = (dict(zip(start, half, strict=True)) for half in (state[:size], state[size:]))
            for step in range(first, min(first + segment, self.steps)):
                used = self.part(step, len(candidates))
                gradients, value = descend(weights, candidates[used], labels[used])
                if float(value) <= self.until:
                    break
                for name, weight in weights.items():
                    speeds[name] = self.momentum * speeds[name] + gradients[name] + self.weight_decay * weight
                    weights[name] = weight - self.lr * speeds[name]
            return *weights.values(), *speeds.values()

        size, values = len(start), [weight.detach() for weight in start.values()]
        state = (*values, *(torch.zeros_like(weight) for weight in values))
        checkpointed = 0 < segment < self.steps and torch.is_grad_enabled() and images.requires_grad
        segment = segment if checkpointed else max(self.steps, 1)
        for first in range(0, self.steps, segment):
            if checkpointed:
                # Only the reentrant variant allows torch.func inside.
                state = checkpoint(go_on, first, images, *state, use_reentrant=True, preserve_rng_state=False)
            else:
                state = go_on(first, images, *state)
        return dict(zip(start, state[:size], strict=True))

    def _private_gradient(
        self, model: nn.Module, weights: Weights, generator: torch.Generator | None
    ) -> Callable[[Batch], Update]:
        """The mean clipped and noisy gradient of a batch at the current values of `weights`."""
        assert self.dp is not None
        defense = DPSGD(self.dp.bound, self.noise_multiplier)
        if generator is None and defense.noise_multiplier:
            raise ConfigError("a training with noise needs a generator that draws it, which the attacker does not have")
        defense.prepare(model)
        drawn = torch.Generator() if generator is None else generator

        def gradient(batch: Batch, differentiable: Differentiable = "no") -> Update:
            def loss(at: Weights) -> Tensor:
                return losses(self.task, functional_call(model, at, (batch.images,)), batch.labels).mean()

            found: Update = torch.func.grad(loss)({name: weight.detach() for name, weight in weights.items()})
            return found

        return lambda batch: update_of_batch(defense, gradient, batch, drawn, _CLIPPED_AT_ONCE)
