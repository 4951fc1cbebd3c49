"""Training images from the conditions that a released model's weights fulfil at the end of its training."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from lit_recon.attacks.base import SimpleState
from lit_recon.attacks.trainset.base import Candidates, ReleasedModel, TrainsetAttack, homogeneity
from lit_recon.attacks.trainset.inner import is_linear_in_weights
from lit_recon.attacks.trainset.subspace import Span, training_span
from lit_recon.attacks.trainset.training import losses, margins
from lit_recon.errors import ConfigError, ShapeError, ThreatModelError
from lit_recon.records import Reconstruction

#: Factor of the multipliers' bound beside the images' box, as in the code of [Haim2022].
_BOUND_FACTOR = 5.0
#: Points of the loss curve.
_POINTS = 1000


class SmoothedReLU(nn.Module):
    """ReLU whose derivative at `u` is `sigmoid(alpha * u)`, so that the derivative can be differentiated."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, u: Tensor) -> Tensor:
        smooth = F.softplus(u, beta=self.alpha, threshold=40.0)  # linear where sigmoid rounds to 1
        return F.relu(u).detach() + (smooth - smooth.detach())


def smoothed(model: nn.Module, alpha: float) -> nn.Module:
    """A copy of a network, in evaluation mode, with a `SmoothedReLU` for every `nn.ReLU`."""
    model = copy.deepcopy(model).eval()
    replace_relu(model, lambda: SmoothedReLU(alpha))
    return SmoothedReLU(alpha) if isinstance(model, nn.ReLU) else model


def replace_relu(model: nn.Module, smooth: Callable[[], nn.Module]) -> None:
    """Put a smooth module in every place of an `nn.ReLU` below `model`, also where one object has several places."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # named_children() leaves out an object's further places
            if isinstance(child, nn.ReLU):
                setattr(module, name, smooth())


def unsmoothed(seen: ReleasedModel) -> list[str]:
    """A note on a network in which there is nothing to smooth; none on one that is linear in its weights."""
    if any(isinstance(module, nn.ReLU) for module in seen.model.modules()) or is_linear_in_weights(seen):
        return []
    note = (
        f"nothing was smoothed, as this {type(seen.model).__name__} has no module nn.ReLU; a ReLU that it calls as a "
        "function has no useful derivative for this attack: make it a module"
    )
    return [note]


def box_penalty(images: Tensor, mean: Tensor) -> Tensor:
    """Sum of squared distances of `images - mean` to [-1, 1]."""
    return F.relu((images - mean).abs() - 1).square().sum()


class _Problem:
    """What the variables are evaluated with; it follows from the start, and nothing of it is saved."""

    def __init__(self, start: Candidates, alpha: float, span: Span | None, repeats: int) -> None:
        self.start, self.span, self.repeats = start, span, repeats
        self.labels = start.seen.with_known(start.images, start.labels, repeats)[1]
        self.model = smoothed(start.seen.model, alpha)
        self.weights = {name: weight.clone() for name, weight in start.seen.weights.items()}
        self.outside = 0.0  # squared norm of the first weight outside the span, where gradients are 0
        if span is not None:
            span.narrow(self.model)
            name = f"{span.layer}.weight"
            self.weights[name] = start.seen.weights[name] @ span.inputs.T
            self.outside = float(start.seen.weights[name].square().sum() - self.weights[name].square().sum())
        for weight in self.weights.values():
            weight.requires_grad_()

    def images(self, pixels: Tensor) -> Tensor:
        """Candidates `(m, c, h, w)`, whose variables are pixels minus the mean image, or coordinates in the span."""
        return pixels + self.start.seen.mean if self.span is None else self.span.images(pixels)

    def examples(self, pixels: Tensor) -> Tensor:
        """Known training images and the candidates, one for each of `labels`."""
        return self.start.seen.with_known(self.images(pixels), self.start.labels, self.repeats)[0]

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass


@dataclass(frozen=True)
class _Stationary(TrainsetAttack):
    """Candidates at which the gradient of a function of the outputs equals the released weights.

    The outputs are those of all training images, the known ones and the candidates.

    Args:
        steps: of both optimizers.
        optimizer: SGD with momentum 0.9, as in the papers, or Adam.
        lr: learning rate of the images.
        alpha: slope at 0 of the smoothed derivative of ReLU.
        subspace: search in the span of the training images that the first layer shows.
    """

    steps: int = 3000
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 0.01
    alpha: float = 20.0
    subspace: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or not min(self.lr, self.alpha) > 0:
            raise ConfigError(
                f"steps must be at least 1, lr and alpha above 0; got {self.steps}, {self.lr:g} and {self.alpha:g}"
            )
        if self.optimizer not in ("adam", "sgd"):
            raise ConfigError(f"optimizer must be 'adam' or 'sgd'; got {self.optimizer!r}")

    @abstractmethod
    def _potential(self, state: SimpleState, outputs: Tensor) -> Tensor:
        """The number whose gradient is to equal the weights, from outputs `(n, k)` of known images and candidates."""

    @abstractmethod
    def _assumptions(self, seen: ReleasedModel) -> list[str]:
        """For the notes of the result."""

    def _variables(self, start: Candidates, generator: torch.Generator) -> dict[str, object]:
        """Variables besides the images."""
        return {}

    def _repeats(self, start: Candidates) -> int:
        """How often each known image is taken."""
        return 1

    def _bound(self, state: SimpleState) -> Tensor:
        """The penalty of variables besides the images."""
        problem: _Problem = state["problem"]
        return problem.start.like.new_zeros(())

    def _optimizer(self, variable: Tensor, lr: float) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam([variable], lr=lr)
        return torch.optim.SGD([variable], lr=lr, momentum=0.9)

    def check(self, start: Candidates) -> None:
        if self.subspace:
            training_span(start.seen)

    def init(self, start: Candidates) -> SimpleState:
        generator = torch.Generator().manual_seed(start.seed)
        span = training_span(start.seen) if self.subspace else None
        images = start.images.to(start.like)
        pixels = (images - start.seen.mean if span is None else span.coordinates(images)).clone().requires_grad_()
        variables = self._variables(start, generator)
        log_every = max(1, self.steps // _POINTS)
        optimizer = self._optimizer(pixels, self.lr)
        problem = _Problem(start, self.alpha, span, self._repeats(start))
        return SimpleState([start], log_every, problem=problem, pixels=pixels, optimizer=optimizer, **variables)

    def residual(self, state: SimpleState) -> Tensor:
        """Squared distance between the weights and the gradient that is to equal them."""
        problem: _Problem = state["problem"]
        outputs = functional_call(problem.model, problem.weights, (problem.examples(state["pixels"]),))
        weights = list(problem.weights.values())
        gradients = torch.autograd.grad(
            self._potential(state, outputs), weights, create_graph=True, materialize_grads=True
        )
        parts = [
            (weight.detach() - gradient).square().sum() for weight, gradient in zip(weights, gradients, strict=True)
        ]
        return torch.stack(parts).sum() + problem.outside

    def step(self, state: SimpleState) -> None:
        problem: _Problem = state["problem"]
        stationarity = self.residual(state)
        box, bound = box_penalty(problem.images(state["pixels"]), problem.start.seen.mean), self._bound(state)
        optimizers = [state[name] for name in ("optimizer", "multiplier_optimizer") if name in state.variables]
        variables = [group["params"][0] for optimizer in optimizers for group in optimizer.param_groups]
        loss = stationarity + box + bound
        if not torch.isfinite(loss):
            raise ConfigError(
                f"the attack diverged at step {state.step}: its objective is {float(loss.detach()):g}, where it must "
                f"be finite; lower lr={self.lr:g} (and multiplier_lr, if there is one)"
            )
        for variable, gradient in zip(variables, torch.autograd.grad(loss, variables), strict=True):
            variable.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
        relative = stationarity / _squared_norm(problem.start.seen)
        state.note(loss[None], residual=relative[None], box=box[None], bound=bound[None])

    def result(self, state: SimpleState) -> Reconstruction:
        problem: _Problem = state["problem"]
        seen = problem.start.seen
        residual = float(self.residual(state).detach() / _squared_norm(seen))
        notes = [*self._assumptions(seen), *unsmoothed(seen)]
        if problem.span is not None:
            notes.append(f"candidates are in a subspace of {len(problem.span.basis)} dimensions, from the first layer")
        images = problem.images(state["pixels"]).detach()
        return Reconstruction(images, problem.start.labels, residual, dict(state.curves[0][0]), tuple(notes))


def _squared_norm(seen: ReleasedModel) -> Tensor:
    return torch.stack([weight.square().sum() for weight in seen.weights.values()]).sum()


def _holds_at_any_loss(seen: ReleasedModel) -> bool:
    """Whether weights, if they are stationary, are a sum of gradients of margins, or of outputs, whatever the loss."""
    return bool(seen.weight_decay) and seen.n_classes == 2


@dataclass(frozen=True)
class MarginKKT(_Stationary):
    """Training images from the Karush-Kuhn-Tucker conditions of the largest margin.

    Gradient descent on the logistic or cross-entropy loss of a homogeneous network converges in direction to weights
    `theta = sum_i lambda_i grad margin_i(theta)`, with multipliers of at least 0. Images and multipliers are sought for
    which that holds, starting at `Candidates.images`, with their labels as they are. With weight decay and two classes
    the condition holds wherever the training has converged; with more classes only in the limit of zero loss, as every
    wrong class has its share in the gradient of an image, and the margin has the largest of them alone. In regression
    it is `theta = sum_i lambda_i grad output_i(theta)` with multipliers of any sign.

    The objective: the squared distance of `theta` to the mean of `lambda_i grad margin_i(theta)`; squared distances of
    the candidates, minus the mean image, to [-1, 1]; 5 times those of `lambda_i` to the values above `min_multiplier`.

    Args:
        multiplier_lr: learning rate of the multipliers.
        min_multiplier: what multipliers are at least, in binary and multiclass tasks; the paper has 0.01 to 0.5.
        multiplier_scale: multipliers start uniformly in [0, multiplier_scale], in regression normally distributed with
            this standard deviation; the paper has 1.
        max_loss: the largest training loss at which the condition is taken to hold without weight decay, or with more
            than two classes.

    Known training images have multipliers, too.

    Source: [Haim2022]; multiclass and regression: [Buzaglo2023].
    """

    multiplier_lr: float = 0.02
    min_multiplier: float = 0.5
    multiplier_scale: float = 4.0
    max_loss: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not min(self.multiplier_lr, self.multiplier_scale, self.max_loss) > 0 or not self.min_multiplier >= 0:
            raise ConfigError(
                "multiplier_lr, multiplier_scale and max_loss must be above 0 and min_multiplier at least 0; got "
                f"{self.multiplier_lr:g}, {self.multiplier_scale:g}, {self.max_loss:g} and {self.min_multiplier:g}"
            )

    def check(self, start: Candidates) -> None:
        super().check(start)
        seen = start.seen
        homogeneity(seen)
        if start.n_examples < seen.n_unknown:
            known = f", {seen.n_known} of them known" if seen.n_known else ""
            raise ShapeError(
                f"the weights are a sum over all {seen.n_examples} training images{known}, which {start.n_examples} "
                "candidates cannot stand for: start with at least as many candidates, better twice as many"
            )
        if _holds_at_any_loss(seen):
            return
        if seen.task == "regression":
            raise ThreatModelError(
                "in regression the condition of stationarity holds for a training with weight decay; here it is "
                f"{'unknown' if seen.weight_decay is None else '0'}: give the weight decay of the training"
            )
        if seen.loss is None or not seen.loss <= self.max_loss:
            classes = f", with {seen.n_classes} classes also under weight decay" if seen.weight_decay else ""
            advice = ", or use Stationarity" if seen.weight_decay else ""
            raise ThreatModelError(
                f"the condition of the largest margin holds for weights trained to almost zero loss{classes}; the loss "
                f"of this model is {'unknown' if seen.loss is None else f'{seen.loss:.3g}'}, and at most max_loss="
                f"{self.max_loss:g} is taken as almost zero: attack a model that was trained further{advice}"
            )

    def _variables(self, start: Candidates, generator: torch.Generator) -> dict[str, object]:
        draw = torch.randn if start.seen.task == "regression" else torch.rand
        n = start.seen.n_known + start.n_examples
        drawn = self.multiplier_scale * draw(n, generator=generator, dtype=torch.float64)
        multipliers = drawn.to(start.like).requires_grad_()
        return {
            "multipliers": multipliers,
            "multiplier_optimizer": self._optimizer(multipliers, self.multiplier_lr),
        }

    def _potential(self, state: SimpleState, outputs: Tensor) -> Tensor:
        problem: _Problem = state["problem"]
        multipliers: Tensor = state["multipliers"]
        return (multipliers * margins(problem.start.seen.task, outputs, problem.labels)).mean()

    def _bound(self, state: SimpleState) -> Tensor:
        if state["problem"].start.seen.task == "regression":
            return super()._bound(state)
        multipliers: Tensor = state["multipliers"]
        return _BOUND_FACTOR * F.relu(self.min_multiplier - multipliers).square().sum()

    def _assumptions(self, seen: ReleasedModel) -> list[str]:
        if _holds_at_any_loss(seen):
            return [f"weights taken as stationary with weight decay {seen.weight_decay:g}, which is not checked"]
        return [f"weights of the largest margin; the training loss is {seen.loss:.2g}"]


@dataclass(frozen=True)
class Stationarity(_Stationary):
    """Training images at which the gradient of the regularized mean loss vanishes at the released weights.

    It vanishes where the training has converged, without noise or `parts`; that is taken for granted, not checked.
    Unlike in `MarginKKT` there are no free multipliers: minus the loss's derivative at the candidate's own output,
    divided by their number and the weight decay, is in their place. Known training images count as often as there are
    candidates for each unknown one. The objective is the squared norm of the gradient, summed
    over all tensors and divided by the squared weight decay, plus the same box around the mean image. A network need
    not be homogeneous.

    Source: the stationarity of the regularized loss that [Runkel2024] start from; the attack is this package's own.
    """

    def _repeats(self, start: Candidates) -> int:
        return start.seen.repeats_of_known(start.n_examples)

    def check(self, start: Candidates) -> None:
        super().check(start)
        self._repeats(start)
        if not start.seen.weight_decay:
            raise ThreatModelError(
                "the gradient of the regularized loss tells training images apart from others only with a weight decay "
                f"that is known and above 0; here it is {'unknown' if start.seen.weight_decay is None else '0'}, and "
                "all images far from the decision boundary are solutions: give the weight decay, or use MarginKKT"
            )

    def _potential(self, state: SimpleState, outputs: Tensor) -> Tensor:
        problem: _Problem = state["problem"]
        seen = problem.start.seen
        assert seen.weight_decay
        return -losses(seen.task, outputs, problem.labels).mean() / seen.weight_decay

    def _assumptions(self, seen: ReleasedModel) -> list[str]:
        decay = f"{seen.weight_decay:g}"
        return [f"weights taken as stationary for the mean loss with weight decay {decay}, which is not checked"]
