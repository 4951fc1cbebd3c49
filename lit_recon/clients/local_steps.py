"""The forward operator of local training: several steps of SGD or Adam per round (FedAvg)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lit_recon.clients.gradient import GradientOperator, gradient_by_name
from lit_recon.errors import ConfigError, ShapeError
from lit_recon.records import Batch, BatchNormMode, BatchStatistics, Differentiable, Loss, Update, Weights

#: Form of the released update.
Release = Literal["gradient", "difference"]
#: Optimizer of the client.
Optimizer = Literal["sgd", "adam"]
#: Adam's constants, the defaults of PyTorch.
_BETAS, _EPS = (0.9, 0.999), 1e-8
#: What an attack adds to Adam's denominators, as a share of the root mean square of each tensor's: without it, the
#: steps are signs and have no derivative. 0.1 was better than 0.5 and 2 on development images.
_SMOOTHING = 0.1


class _State(NamedTuple):
    """Weights of local training, SGD's velocities or Adam's mean gradients, Adam's mean squares; number of steps."""

    parameters: dict[str, Tensor]
    velocity: dict[str, Tensor]
    squares: dict[str, Tensor]
    step: int


class LocalSteps:
    """The update after `steps` steps of SGD or Adam on the mean loss of the client's images.

    By default it is in units of a gradient, see `release`.

    Every parameter but the `frozen` ones is trained, also those that do not require a gradient, by the update of
    `torch.optim.SGD` (momentum without dampening, no weight decay) or `torch.optim.Adam` (other settings than the rate
    as by default), operation by operation. Pure and differentiable through all steps, like `GradientOperator`; the
    differentiable form of Adam has smoother steps, since its own are nearly signs: after one, `g / (|g| + 1e-8)`.
    Memory grows with the number of steps unless `checkpointing` recomputes each step in the backward pass.
    Checkpointed steps are differentiable once, by plain autograd: enough for an attack, not for the scores of
    `OptimalGradientNoise` and `OptimalGradientPruning`.

    Args:
        model, batch_norm, loss: see `GradientOperator`.
        steps, lr, momentum: at least 1, positive, in [0, 1); Adam has no momentum.
        layer_lrs: other rates by prefix of parameter names, as in `{"head": 0.01}`; the longest match applies.
        batches: mini-batches of equal size, in the order of the images; step i takes number `i % batches`.
        release: the plain `difference`, or divided per layer by the rate times the sum of the momentum's weights
            (`gradient`): the constant gradient that would move the weights as far; with one step of SGD the gradient
            itself; of Adam, the mean step in units of the rate.
        checkpointing: see above.
        optimizer: `sgd` or `adam`.
        frozen: names of parameters that stay as they are.

    Raises:
        ConfigError: a number out of its range, or a layer without parameters; when called, checkpointing with
            `functional`.
        ShapeError: when called with images that cannot be divided into mini-batches of equal size.

    Source: [McMahan2017]; Adam: [Kingma2015]; as the target of an attack, [Geiping2020], section 5.2.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: int = 1,
        lr: float = 0.01,
        momentum: float = 0.0,
        layer_lrs: Mapping[str, float] | None = None,
        batches: int = 1,
        release: Release = "gradient",
        batch_norm: BatchNormMode = "eval",
        checkpointing: bool = False,
        loss: Loss = cross_entropy,
        optimizer: Optimizer = "sgd",
        frozen: Collection[str] = (),
    ) -> None:
        if steps < 1 or not 1 <= batches <= steps:
            raise ConfigError(
                f"LocalSteps needs steps >= 1 and 1 <= batches <= steps, so that every image is used; "
                f"got steps={steps} and batches={batches}"
            )
        if not 0 <= momentum < 1:
            raise ConfigError(f"LocalSteps needs momentum in [0, 1); got {momentum:g}: the usual value is 0.9")
        if optimizer not in ("sgd", "adam"):
            raise ConfigError(f"LocalSteps needs optimizer 'sgd' or 'adam'; got {optimizer!r}")
        if optimizer == "adam" and momentum:
            raise ConfigError(f"Adam has no momentum of its own to be set; got momentum={momentum:g}: leave it out")
        if release not in ("gradient", "difference"):
            raise ConfigError(f"LocalSteps needs release 'gradient' or 'difference'; got {release!r}")
        self.steps, self.momentum, self.batches, self.checkpointing = steps, momentum, batches, checkpointing
        self.release: Release = release
        self.optimizer: Optimizer = optimizer
        self.frozen = frozen
        self.rates = _rates([name for name, _ in model.named_parameters()], lr, dict(layer_lrs or {}))
        self._gradient = GradientOperator(model, batch_norm, loss)
        self.batch_norm: BatchNormMode = batch_norm

    def __call__(self, weights: Weights, batch: Batch, differentiable: Differentiable = "no") -> Update:
        after = self.train(weights, batch, differentiable)
        update = {name: before - after[name] for name, before in weights.parameters.items()}
        return update if self.release == "difference" else self._divided(update)

    def as_gradient(self, update: Update) -> Update:
        """A released update as `release="gradient"` would have it."""
        return update if self.release == "gradient" else self._divided(update)

    def _divided(self, difference: Update) -> Update:
        return {name: value / (self.rates[name] * self.path) for name, value in difference.items()}

    @property
    def parts(self) -> int:
        return self.batches

    @property
    def additive(self) -> bool:
        return self.steps == 1 and self.optimizer == "sgd" and self._gradient.additive

    @property
    def path(self) -> float:
        """Displacement by a constant gradient of 1 at rate 1: the sum over steps s of 1 + m + ... + m^s."""
        return path_length(self.steps, self.momentum)

    @property
    def largest_weight(self) -> float:
        """Of an image in the displacement by constant gradients, relative to the mean of all images' weights."""
        weights = [0.0] * self.batches
        for step in range(self.steps):
            # a gradient moves the weights in its own step and, by momentum, in all later ones
            weights[step % self.batches] += sum(self.momentum**i for i in range(self.steps - step))
        return self.batches * max(weights) / self.path

    def least_change(self, name: str, parameter: Tensor) -> Tensor:
        """Released entries of a parameter that moves by the spacing of its floating-point numbers in every step."""
        moved = self.steps * spacing(parameter)
        return moved / (self.rates[name] * self.path) if self.release == "gradient" else moved

    def train(self, weights: Weights, batch: Batch, differentiable: Differentiable = "no") -> dict[str, Tensor]:
        """The parameters after local training."""
        for state in self._states(weights, batch, differentiable):
            after = state.parameters
        return after

    def way(self, weights: Weights, batch: Batch) -> list[dict[str, Tensor]]:
        """The parameters before each step of `train`, detached."""
        states = list(self._states(weights, batch, "no"))[:-1]
        return [{name: value.detach() for name, value in state.parameters.items()} for state in states]

    def _states(self, weights: Weights, batch: Batch, differentiable: Differentiable) -> Iterator[_State]:
        """The state before the first step and after each."""
        size, rest = divmod(len(batch.images), self.batches)
        if size == 0 or rest:
            raise ShapeError(
                f"{len(batch.images)} images cannot be cut into batches={self.batches} mini-batches of equal size: "
                f"take a multiple of {self.batches} images, or set batches to 1"
            )
        functional = differentiable == "functional"
        if functional and self.checkpointing:
            raise ConfigError(
                "checkpointed local steps are differentiated by plain autograd: attack with execution: loop and "
                "compilation: none, or set checkpointing to false"
            )
        # an eager derivative treats weights as constants, as in GradientOperator
        start = {name: value if functional else value.detach() for name, value in weights.parameters.items()}
        state = _State(start, {}, {}, 0)
        run = self._checkpointed if self.checkpointing and differentiable == "autograd" else self._step
        yield state
        for step in range(self.steps):
            first = step % self.batches * size
            state = run(state, weights.buffers, batch.examples(first, first + size), differentiable)
            yield state

    def with_statistics(
        self, weights: Weights, batch: Batch, differentiable: Differentiable = "no"
    ) -> tuple[Update, BatchStatistics]:
        """The update, and the statistics of all images at the initial weights; costs one more forward pass."""
        return self(weights, batch, differentiable), self.statistics(weights, batch)

    def statistics(self, weights: Weights, batch: Batch) -> BatchStatistics:
        return self._gradient.statistics(weights, batch)

    def _step(
        self,
        state: _State,
        buffers: Mapping[str, Tensor],
        batch: Batch,
        differentiable: Differentiable,
        smooth: bool | None = None,
    ) -> _State:
        """The state after one more step; `smooth` steps of Adam: default: where they are differentiable."""
        if differentiable == "functional":
            gradient = self._gradient(Weights(state.parameters, buffers), batch, "functional")
        else:
            # weights stay connected to the graph of earlier steps
            inputs = {
                name: p if p.requires_grad else p.detach().requires_grad_() for name, p in state.parameters.items()
            }
            with torch.enable_grad():
                loss = self._gradient.loss(Weights(inputs, buffers), batch)
            gradient = gradient_by_name(loss, inputs, differentiable)
        gradient = {name: torch.zeros_like(g) if name in self.frozen else g for name, g in gradient.items()}
        if self.optimizer == "adam":
            return self._adam(state, gradient, differentiable != "no" if smooth is None else smooth)
        velocity = gradient
        if self.momentum and state.velocity:
            # two operations, not one fused: same rounding as torch.optim.SGD
            velocity = {name: state.velocity[name] * self.momentum + value for name, value in gradient.items()}
        moved = {name: torch.add(p, velocity[name], alpha=-self.rates[name]) for name, p in state.parameters.items()}
        return _State(moved, velocity if self.momentum else {}, {}, state.step + 1)

    def _adam(self, state: _State, gradient: Update, smooth: bool) -> _State:
        """The state after one more step of Adam, with the rounding of torch.optim.Adam unless `smooth`."""
        (first, second), step = _BETAS, state.step + 1
        means, squares, moved = {}, {}, {}
        for name, value in gradient.items():
            mean = torch.zeros_like(value) if state.step == 0 else state.velocity[name]
            square = torch.zeros_like(value) if state.step == 0 else state.squares[name]
            means[name] = mean = torch.lerp(mean, value, 1 - first)
            squares[name] = square = torch.addcmul(square * second, value, value, value=1 - second)
            if smooth:
                # the square root of 0 has no derivative
                square = square + _SMOOTHING**2 * square.mean() + torch.finfo(square.dtype).tiny
            denominator = square.sqrt() / (1 - second**step) ** 0.5 + _EPS
            size = -self.rates[name] / (1 - first**step)
            moved[name] = torch.addcdiv(state.parameters[name], mean, denominator, value=size)
        return _State(moved, means, squares, step)

    def _checkpointed(
        self, state: _State, buffers: Mapping[str, Tensor], batch: Batch, differentiable: Differentiable
    ) -> _State:
        parts = (state.parameters, state.velocity, state.squares)
        keys = [(part, name) for part, tensors in enumerate(parts) for name in tensors]
        shape: list[tuple[int, str]] = []

        def step(images: Tensor, labels: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            before = _state(keys, tensors, state.step)
            same = batch._replace(images=images, labels=labels)
            after = self._step(before, buffers, same, "autograd" if torch.is_grad_enabled() else "no", smooth=True)
            shape[:] = [(part, name) for part, own in enumerate(after[:3]) for name in own]
            return tuple(value for own in after[:3] for value in own.values())

        recomputed: Any = _Recomputed.apply  # untyped in PyTorch
        tensors = (value for part in parts for value in part.values())
        results: tuple[Tensor, ...] = recomputed(step, batch.images, batch.labels, *tensors)
        return _state(shape, results, state.step + 1)


def _state(keys: Sequence[tuple[int, str]], tensors: Sequence[Tensor], step: int) -> _State:
    """The state after `step` steps whose parameters, velocities and squares are in a flat list."""
    state = _State({}, {}, {}, step)
    for (part, name), value in zip(keys, tensors, strict=True):
        (state.parameters, state.velocity, state.squares)[part][name] = value
    return state


def path_length(steps: int, momentum: float) -> float:
    """Displacement by a constant gradient of 1 at rate 1: the sum over steps s of 1 + m + ... + m^s."""
    return sum(momentum**i for step in range(steps) for i in range(step + 1))


def spacing(values: Tensor) -> Tensor:
    """The distance between floating-point numbers at the values."""
    exponent = torch.frexp(values.detach())[1]
    return torch.ldexp(torch.full_like(values, 0.5 * torch.finfo(values.dtype).eps), exponent)


class _Recomputed(torch.autograd.Function):
    """A function of tensors that stores only its inputs and is recomputed in the backward pass.

    With `torch.utils.checkpoint` the gradient within a step would trigger recomputation in the forward pass too.
    """

    @staticmethod
    def forward(ctx: Any, function: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        results: tuple[Tensor, ...] = function(*inputs)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [value.detach().requires_grad_(flag) for value, flag in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            results = ctx.function(*inputs)
        wanted = [value for value, flag in zip(inputs, needed, strict=True) if flag]
        found = iter(torch.autograd.grad(results, wanted, gradients, allow_unused=True))
        return (None, *(next(found) if flag else None for flag in needed))


def _rates(names: list[str], lr: float, layer_lrs: dict[str, float]) -> dict[str, float]:
    """Learning rate by parameter name."""
    for prefix, rate in (("all layers", lr), *layer_lrs.items()):
        if not 0 < rate < float("inf"):
            raise ConfigError(f"LocalSteps needs a positive, finite learning rate for {prefix}; got {rate:g}")
    unused = [prefix for prefix in layer_lrs if not any(_belongs(name, prefix) for name in names)]
    if unused:
        raise ConfigError(f"layer_lrs names {unused}, but no parameter begins so; parameters are {names}")
    fitting = {name: [prefix for prefix in layer_lrs if _belongs(name, prefix)] for name in names}
    return {name: layer_lrs[max(prefixes, key=len)] if prefixes else lr for name, prefixes in fitting.items()}


def _belongs(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")
