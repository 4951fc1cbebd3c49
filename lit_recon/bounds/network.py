"""Fisher information of a client's images in the gradient of a network of any size, without storing a Jacobian.

The Jacobian `J` of an update (p coordinates) with respect to the pixels (q) of a batch is never formed: `J^T diag(w) J`
comes column by column from products with it, exactly up to rounding. `ProductJacobian` takes them by automatic
differentiation of any function. `NetworkJacobian` is faster for the gradient of a network. It differentiates only the
inputs of convolutions and linear layers (patches `A`, by position) and the derivatives `D` of the loss in their
outputs; the change `dD A^T + D dA^T` of a weight's gradient `D A^T`, and its adjoint, are matrix products, between
positions where these are few. Piecewise linear networks need forward derivatives alone (`piecewise.py`).

Activations count as fixed where their derivative jumps: the information is local.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

from lit_recon.bounds.fisher import Jacobian
from lit_recon.bounds.layers import WeightLayer, hooked, is_plain, weighted
from lit_recon.bounds.piecewise import PiecewiseLinear
from lit_recon.errors import ConfigError, TimeLimitError
from lit_recon.models.layers import used_elsewhere
from lit_recon.records import Batch, Loss, Update, Weights

#: Called with the share of the work that is done, in (0, 1], and the expected number of seconds for all of it.
Progress = Callable[[float, float], None]


class _Products(Jacobian):
    """A Jacobian at `inputs` of which only products with several vectors `(m, ...)` are computed."""

    def __init__(self, inputs: Tensor, chunk: int, limit: float, progress: Progress | None) -> None:
        if chunk < 1 or not limit > 0:
            raise ConfigError(f"a Jacobian needs chunks of 1 column or more and a limit above 0; got {chunk}, {limit}")
        self.inputs, self.n_inputs, self.chunk, self.limit = inputs, inputs.numel(), chunk, limit
        self._progress = progress

    @abstractmethod
    def along(self, directions: Tensor) -> Update:
        """`J v` for directions of the inputs, `(m, ...)`."""

    @abstractmethod
    def back(self, vectors: Update) -> Tensor:
        """`J^T u` for vectors of the update's shapes, `(m, ...)`; of the inputs' shape, `(m, ...)`."""

    def normal(self, directions: Tensor, weights: Update | float = 1.0) -> Tensor:
        """`J^T diag(w) J v` for directions of the inputs, `(m, ...)`."""
        return self.back(weighted(self.along(directions), weights))

    def transposed(self, vector: Update) -> Tensor:
        return self.back({name: value[None] for name, value in vector.items()}).reshape(-1)

    def gram(self, weights: Update | float = 1.0) -> Tensor:
        """`J^T diag(w) J`, `(q, q)` in double precision; a `TimeLimitError` if it would take longer than `limit`."""
        q = self.n_inputs
        result = torch.zeros(q, q, dtype=torch.float64, device=self.inputs.device)
        clock = _Clock(q, self.limit, self._progress)
        for start in range(0, q, self.chunk):
            stop = min(start + self.chunk, q)
            result[start:stop] = self.normal(self._units(start, stop), weights).reshape(stop - start, q)
            clock.done(stop / q)
        # without rounding, it would be symmetric
        return (result + result.T) / 2

    def _units(self, start: int, stop: int) -> Tensor:
        """Directions of single inputs."""
        units = self.inputs.new_zeros(stop - start, self.n_inputs)
        units[:, start:stop].fill_diagonal_(1.0)
        return units.view(-1, *self.inputs.shape)


class _Clock:
    """Reports progress, and refuses work that is expected to take longer than `limit` seconds."""

    def __init__(self, q: int, limit: float, progress: Progress | None) -> None:
        self._q, self._limit, self._progress, self._start = q, limit, progress, time.perf_counter()

    def done(self, share: float) -> None:
        """Called when this share of the work is done."""
        seconds = (time.perf_counter() - self._start) / share
        if self._progress is not None:
            self._progress(share, seconds)
        if seconds > self._limit:
            raise TimeLimitError(
                f"the information about {self._q:,} pixels would take about {seconds / 60:.3g} minutes, more than the "
                f"limit of {self._limit / 60:.3g}: raise the limit, or take fewer images, smaller ones or a smaller "
                "network"
            )


class ProductJacobian(_Products):
    """The Jacobian of any function from inputs to an update, by automatic differentiation.

    Args:
        function: differentiable by `torch.func`.
        inputs: of any shape, in the precision of all products.
        chunk: columns at a time; memory is that of so many updates, several times.
        limit: largest number of seconds of `gram`, as far as it can be foreseen.
        progress: of `gram`.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Update],
        inputs: Tensor,
        chunk: int = 16,
        limit: float = math.inf,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(inputs, chunk, limit, progress)
        self.update, self._push, self._pull = _linearized(function, inputs)

    def along(self, directions: Tensor) -> Update:
        moved: Update = self._push(directions)
        return moved

    def back(self, vectors: Update) -> Tensor:
        return self._pull(vectors)


class NetworkJacobian(_Products):
    """The Jacobian of the gradient of a network's mean loss at a batch.

    Args:
        network: with a pure forward pass: it changes no buffers, and no tensor in place.
        weights: of the network.
        batch: images `(n, c, h, w)`, in the precision of all products, and their labels.
        loss: of logits `(n, k)` and labels.
        chunk, limit, progress: as for `ProductJacobian`.
        memory: bytes for the changes of several layers; the less, the more often the network is passed.

    Attributes:
        weights, batch: as given.
        computed: the last result of `gram`, which `rounding` checks.
    """

    def __init__(
        self,
        network: nn.Module,
        weights: Weights,
        batch: Batch,
        loss: Loss = cross_entropy,
        chunk: int = 16,
        limit: float = math.inf,
        progress: Progress | None = None,
        memory: float = 2e9,
    ) -> None:
        super().__init__(batch.images, chunk, limit, progress)
        buffers = {**weights.buffers, **batch.masks}
        modules, shapes = _called_once(network, weights.parameters, buffers, batch.images)
        fixed = {f"{name}.{part}" for name, module in modules.items() for part, _ in module.named_parameters()}
        constants = {**buffers, **{name: weights.parameters[name] for name in fixed}}
        others = {name: value for name, value in weights.parameters.items() if name not in fixed}
        nothing = {name: batch.images.new_zeros(shape) for name, shape in shapes.items()}

        def signals(images: Tensor) -> _Signals:
            def value(added: Update, free: Update) -> tuple[Tensor, Update]:
                inputs: Update = {}

                def watch(name: str, given: Tensor, output: Tensor) -> Tensor:
                    inputs[name] = given
                    return output + added[name]

                with hooked(modules, watch):
                    logits = torch.func.functional_call(network, {**constants, **free}, (images,))
                return loss(logits, batch.labels), inputs

            (slopes, rest), inputs = torch.func.grad(value, argnums=(0, 1), has_aux=True)(nothing, others)
            return _Signals(inputs, slopes, rest)

        at, self._push, self._pull = _linearized(signals, batch.images)
        self._layers = {n: WeightLayer(module, at.inputs[n], at.slopes[n]) for n, module in modules.items()}
        own = {f"{n}.{part}": v for n, layer in self._layers.items() for part, v in layer.gradient().items()}
        self.update = {name: {**own, **at.others}[name] for name in weights.parameters}
        self.weights, self.batch = weights, batch
        self._model = network, weights, batch, loss
        self._memory = memory
        self._gram_weights: Update | float = 1.0
        self.computed = batch.images.new_zeros(0, 0)

    def gram(self, weights: Update | float = 1.0) -> Tensor:
        result = weights * self._plain if isinstance(weights, float | int) else super().gram(weights)
        self._gram_weights, self.computed = weights, result.clone()
        return result

    @cached_property
    def _plain(self) -> Tensor:
        """`J^T J`, computed once for noise of any size."""
        if not self.is_piecewise_linear:
            return super().gram()
        clock = _Clock(self.n_inputs, self.limit, self._progress)
        return self._linear.gram(self._units, self.n_inputs, self.chunk, clock.done)

    def rounding(self, samples: int = 4) -> Tensor:
        """Errors of some columns of `computed`, `(q, samples)`: their differences to those in double precision."""
        gram, weights = self.computed, self._gram_weights
        numbers, units = self._checked(samples)
        if not isinstance(weights, float | int):
            weights = {name: value.double() for name, value in weights.items()}
        return gram[:, numbers] - _doubled(*self._model).normal(units, weights).reshape(len(numbers), -1).T

    @cached_property
    def _linear(self) -> PiecewiseLinear:
        return PiecewiseLinear(*self._model, self._memory)

    @cached_property
    def is_piecewise_linear(self) -> bool:
        """Whether the network is one between pixels and logits: random directions violate it with probability 1."""
        if not self._linear.fits:
            return False
        drawn = torch.randn(2, *self.inputs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        directions = drawn.to(self.inputs)
        expected = directions.flatten(1) @ self.normal(directions).flatten(1).T
        found = self._linear.gram(lambda start, stop: directions[start:stop], 2, 2, lambda share: None)
        tolerance = torch.finfo(self.inputs.dtype).eps ** 0.5
        return bool((found - expected).abs().max() <= tolerance * expected.abs().max())

    def along(self, directions: Tensor, names: Collection[str] | None = None) -> Update:
        """`J v` for directions `(m, ...)`, of the tensors of these names alone."""
        names = self.update if names is None else names
        moved = self._push(directions)
        found = dict(moved.others)
        for name, layer in self._layers.items():
            if not any(f"{name}.{part}" in names for part in layer.parts):
                continue
            parts = layer.along(moved.inputs[name], moved.slopes[name])
            found |= {f"{name}.{part}": value for part, value in parts.items()}
        return {name: found[name] for name in self.update if name in names}

    def rows(self, names: Collection[str]) -> tuple[Tensor, float]:
        """Rows `(m, q)` of the entries of these tensors, in the update's order, and their rounding error.

        The error is the Frobenius norm of that of all rows, estimated from some columns in double precision, relative
        to the norm of the rows.
        """
        clock, q = _Clock(self.n_inputs, self.limit, self._progress), self.n_inputs
        size = sum(value.numel() for name, value in self.update.items() if name in names)
        columns = self.inputs.new_empty(q, size)
        for start in range(0, q, self.chunk):
            stop = min(start + self.chunk, q)
            columns[start:stop] = _joined(self.along(self._units(start, stop), names))
            clock.done(stop / q)
        numbers, units = self._checked()
        expected = _joined(_doubled(*self._model).along(units, names))
        # rows of zeros that were computed as such are exact
        error = (columns[numbers] - expected).norm() / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny)
        return columns.T, float(error)

    def _checked(self, samples: int = 4) -> tuple[Tensor, Tensor]:
        """Numbers of some inputs, the same in every call, and their directions in double precision."""
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randperm(self.n_inputs, generator=generator)[:samples].sort().values
        units = torch.nn.functional.one_hot(numbers, self.n_inputs).to(self.inputs.device, torch.float64)
        return numbers, units.view(-1, *self.inputs.shape)

    def back(self, vectors: Update) -> Tensor:
        inputs, slopes = {}, {}
        for name, layer in self._layers.items():
            inputs[name], slopes[name] = layer.back({part: vectors[f"{name}.{part}"] for part in layer.parts})
        own = {f"{name}.{part}" for name, layer in self._layers.items() for part in layer.parts}
        others = {name: value for name, value in vectors.items() if name not in own}
        return self._pull(_Signals(inputs, slopes, others))

    def normal(self, directions: Tensor, weights: Update | float = 1.0) -> Tensor:
        # layer by layer: the changes of all weights at once would take far more memory
        moved = self._push(directions)
        inputs, slopes = {}, {}
        for name, layer in self._layers.items():
            own: Update | float = weights
            if not isinstance(weights, float | int):
                own = {part: weights[f"{name}.{part}"] for part in layer.parts}
            inputs[name], slopes[name] = layer.normal(moved.inputs[name], moved.slopes[name], own)
        return self._pull(_Signals(inputs, slopes, weighted(moved.others, weights)))


class _Signals(NamedTuple):
    """Inputs of layers and derivatives of the loss in their outputs by the layer's name; gradients of the others."""

    inputs: Update
    slopes: Update
    others: Update


def _linearized(
    function: Callable[[Tensor], Any], inputs: Tensor
) -> tuple[Any, Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The value of a function that returns a tree of tensors, its Jacobian's products, and those of its transpose."""
    value, back, *_ = torch.func.vjp(function, inputs)
    value = tree_map(torch.detach, value)

    def along(directions: Tensor) -> Any:
        try:
            moved = torch.func.vmap(lambda one: torch.func.jvp(function, (inputs,), (one,))[1])(directions)
        except (NotImplementedError, RuntimeError):  # an operation has no derivative in forward mode
            # the transposed product is linear: its derivative is the product
            _, forward, *_ = torch.func.vjp(lambda vector: back(vector)[0], tree_map(torch.zeros_like, value))
            moved = torch.func.vmap(lambda one: forward(one)[0])(directions)
        return tree_map(torch.detach, moved)

    def transposed(vectors: Any) -> Any:
        return torch.func.vmap(lambda one: back(one)[0])(vectors).detach()

    return value, along, transposed


def _doubled(network: nn.Module, weights: Weights, batch: Batch, loss: Loss) -> NetworkJacobian:
    images, labels, masks = batch
    return NetworkJacobian(
        network, Weights(*map(doubled, weights)), Batch(images.double(), labels, doubled(masks)), loss
    )


def _joined(moved: Update) -> Tensor:
    return torch.cat([value.flatten(1) for value in moved.values()], dim=1)


def doubled(tensors: Mapping[str, Tensor]) -> Update:
    """Floating-point tensors in double precision, the others as they are."""
    return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}


def _called_once(
    network: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], images: Tensor
) -> tuple[dict[str, nn.Module], dict[str, torch.Size]]:
    """The convolutions and linear layers that are called exactly once, and the shapes of their outputs.

    None that shares a parameter: what another layer or function does with it would be missing in its gradient.
    """
    modules = {
        name: module
        for name, module in network.named_modules()
        if is_plain(module) and all(f"{name}.{part}" in parameters for part, _ in module.named_parameters())
    }
    shapes: dict[str, list[torch.Size]] = {name: [] for name in modules}

    def run(given: Update) -> Tensor:
        with hooked(modules, lambda name, _, output: shapes[name].append(output.shape)):
            logits: Tensor = torch.func.functional_call(network, {**buffers, **given}, (images,))
        return logits

    shared = used_elsewhere(modules.values(), parameters, run)
    once = {
        name: calls[0]
        for name, calls in shapes.items()
        if len(calls) == 1 and not shared & {f"{name}.{part}" for part, _ in modules[name].named_parameters()}
    }
    return {name: modules[name] for name in once}, once
