"""Fisher information of a client's images in the gradient of a network of any size, without storing a Jacobian.

The Jacobian `J` of an update (p coordinates) with respect to the pixels (q) of a batch is never formed: `J^T diag(w) J`
comes column by column from products with it, exactly up to rounding. `ProductJacobian` takes them by automatic
differentiation of any function. `NetworkJacobian` is faster for the gradient of a network. It differentiates only the
inputs `A` (patches, by position) of convolutions and linear layers and the derivatives `D` of the loss in their outputs;
the change `dD^T A + D^T dA` of a weight's gradient `D^T A`, and its adjoint, are matrix products, between positions
where these are few.

Activations count as fixed where their derivative jumps: the information is local.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, fold, unfold
from torch.utils._pytree import tree_map

from lit_recon.bounds.fisher import Jacobian
from lit_recon.errors import ConfigError
from lit_recon.records import Batch, Loss, Update, Weights

#: Called with the share of the work that is done, in (0, 1], and the expected number of seconds for all of it.
Progress = Callable[[float, float], None]


class _Products(Jacobian):
    """A Jacobian at `inputs` of which only products with several vectors `(m, ...)` are computed.

    Attributes:
        rounding: after `gram`, its antisymmetric part, which is rounding alone; the symmetric part has as large errors.
    """

    def __init__(self, inputs: Tensor, chunk: int, limit: float, progress: Progress | None) -> None:
        if chunk < 1 or not limit > 0:
            raise ConfigError(f"a Jacobian needs chunks of 1 column or more and a limit above 0; got {chunk}, {limit}")
        self.inputs, self.n_inputs, self.chunk, self.limit = inputs, inputs.numel(), chunk, limit
        self.rounding = inputs.new_zeros(0, 0)
        self._progress = progress

    @abstractmethod
    def along(self, directions: Tensor) -> Update:
        """`J v` for directions of the inputs, `(m, ...)`."""

    @abstractmethod
    def back(self, vectors: Update) -> Tensor:
        """`J^T u` for vectors of the update's shapes, `(m, ...)`; of the inputs' shape, `(m, ...)`."""

    def normal(self, directions: Tensor, weights: Update | float = 1.0) -> Tensor:
        """`J^T diag(w) J v` for directions of the inputs, `(m, ...)`."""
        return self.back(_weighted(self.along(directions), weights))

    def transposed(self, vector: Update) -> Tensor:
        return self.back({name: value[None] for name, value in vector.items()}).reshape(-1)

    def gram(self, weights: Update | float = 1.0) -> Tensor:
        """`J^T diag(w) J`, `(q, q)` in double precision; a `ConfigError` if it would take longer than `limit`."""
        q, start = self.n_inputs, time.perf_counter()
        result = torch.zeros(q, q, dtype=torch.float64, device=self.inputs.device)
        for first in range(0, q, self.chunk):
            numbers = torch.arange(first, min(first + self.chunk, q))
            units = self.inputs.new_zeros(len(numbers), q)
            units[torch.arange(len(numbers)), numbers] = 1.0
            columns = self.normal(units.view(-1, *self.inputs.shape), weights)
            result[numbers] = columns.reshape(len(numbers), q).double()
            done = (int(numbers[-1]) + 1) / q
            seconds = (time.perf_counter() - start) / done
            if self._progress is not None:
                self._progress(done, seconds)
            if seconds > self.limit:
                raise ConfigError(
                    f"the information about {q:,} pixels would take about {seconds / 60:.3g} minutes, more than the "
                    f"limit of {self.limit / 60:.3g}: raise the limit, or take fewer images, smaller ones or a smaller "
                    "network"
                )
        self.rounding = (result - result.T) / 2
        return (result + result.T) / 2


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
        return self._push(directions)

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
                with _watched(modules, added) as inputs:
                    logits = torch.func.functional_call(network, {**constants, **free}, (images,))
                return loss(logits, batch.labels), inputs

            (slopes, rest), inputs = torch.func.grad(value, argnums=(0, 1), has_aux=True)(nothing, others)
            return _Signals(inputs, slopes, rest)

        at, self._push, self._pull = _linearized(signals, batch.images)
        self._layers = {n: _Layer(module, at.inputs[n], at.slopes[n]) for n, module in modules.items()}
        own = {f"{n}.{part}": v for n, layer in self._layers.items() for part, v in layer.gradient().items()}
        self.update = {name: {**own, **at.others}[name] for name in weights.parameters}

    def along(self, directions: Tensor) -> Update:
        moved = self._push(directions)
        found = dict(moved.others)
        for name, layer in self._layers.items():
            parts = layer.along(moved.inputs[name], moved.slopes[name])
            found |= {f"{name}.{part}": value for part, value in parts.items()}
        return {name: found[name] for name in self.update}

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
        return self._pull(_Signals(inputs, slopes, _weighted(moved.others, weights)))


class _Signals(NamedTuple):
    """Inputs of layers and derivatives of the loss in their outputs by the layer's name; gradients of the others."""

    inputs: Update
    slopes: Update
    others: Update


def _linearized(function: Callable[[Tensor], Any], inputs: Tensor) -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """The value of a function that returns a tree of tensors, its Jacobian's products, and those of its transpose."""
    value, back, *_ = torch.func.vjp(function, inputs)
    value = tree_map(torch.detach, value)
    # the transposed product is linear: its derivative is the product
    _, forward, *_ = torch.func.vjp(lambda vector: back(vector)[0], tree_map(torch.zeros_like, value))

    def along(directions: Tensor) -> Any:
        return tree_map(torch.detach, torch.func.vmap(lambda one: forward(one)[0])(directions))

    def transposed(vectors: Any) -> Any:
        return torch.func.vmap(lambda one: back(one)[0])(vectors).detach()

    return value, along, transposed


def _weighted(vectors: Update, weights: Update | float) -> Update:
    return {name: v * (weights if isinstance(weights, float | int) else weights[name]) for name, v in vectors.items()}


def _called_once(
    network: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], images: Tensor
) -> tuple[dict[str, nn.Module], dict[str, torch.Size]]:
    """The convolutions and linear layers that are called exactly once, and the shapes of their outputs."""
    modules = {
        name: module
        for name, module in network.named_modules()
        if type(module) is nn.Linear
        or (type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros")
        if all(f"{name}.{part}" in parameters for part, _ in module.named_parameters())
    }
    shapes: dict[str, list[torch.Size]] = {name: [] for name in modules}
    hooks = [
        module.register_forward_hook(lambda _, given, out, name=name: shapes[name].append(out.shape))
        for name, module in modules.items()
    ]
    try:
        with torch.no_grad():
            torch.func.functional_call(network, {**buffers, **parameters}, (images,))
    finally:
        for hook in hooks:
            hook.remove()
    once = {name: found[0] for name, found in shapes.items() if len(found) == 1}
    return {name: modules[name] for name in once}, once


@contextmanager
def _watched(modules: Mapping[str, nn.Module], added: Update) -> Iterator[Update]:
    """Collects the inputs of modules, and adds something to their outputs."""
    inputs: Update = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
            inputs[name] = given[0]
            return output + added[name]

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in modules.items()]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


class _Layer:
    """A convolution or linear layer at a batch: a weight's gradient is `D A^T`, of `(o, K)`.

    The patches `A` are `(K, P)` and the derivatives `D` `(o, P)`, for the `P` positions of all images.
    """

    def __init__(self, module: nn.Module, inputs: Tensor, slopes: Tensor) -> None:
        self.module: Any = module
        self.parts = tuple(name for name, _ in module.named_parameters())
        self._input_shape, self._slope_shape = inputs.shape, slopes.shape
        self._patches, self._slopes = self._unfolded(inputs[None])[0], self._flat(slopes[None])[0]
        (size, positions), channels = self._patches.shape, len(self._slopes)
        # multiplications of the two ways of `normal`
        self._few = 3 * positions * (size + channels) < 4 * size * channels
        if self._few:
            self._patch_products = self._patches.T @ self._patches
            self._slope_products = self._slopes.T @ self._slopes

    def gradient(self) -> Update:
        return self._parts((self._slopes @ self._patches.T)[None], self._slopes.sum(dim=1)[None], lead=())

    def along(self, inputs: Tensor, slopes: Tensor) -> Update:
        """Changes of the gradients `(m, ...)` with those of inputs and derivatives, `(m, n, ...)`."""
        moved, bent = self._unfolded(inputs), self._flat(slopes)
        weight = bent @ self._patches.T + self._slopes @ moved.transpose(1, 2)
        return self._parts(weight, bent.sum(dim=2), lead=(len(inputs),))

    def back(self, vectors: Update) -> tuple[Tensor, Tensor]:
        """The adjoint of `along`."""
        weight = vectors["weight"].flatten(2)
        slopes = weight @ self._patches
        if "bias" in self.parts:
            slopes = slopes + vectors["bias"][:, :, None]
        return self._folded(weight.transpose(1, 2) @ self._slopes), self._unflat(slopes)

    def normal(self, inputs: Tensor, slopes: Tensor, weights: Update | float) -> tuple[Tensor, Tensor]:
        """`back` of the weighted `along`."""
        if not (self._few and isinstance(weights, float | int)):
            return self.back(_weighted(self.along(inputs, slopes), weights))
        moved, bent = self._unfolded(inputs), self._flat(slopes)
        back = self._patches @ (bent.transpose(1, 2) @ self._slopes) + moved @ self._slope_products
        bend = bent @ self._patch_products + self._slopes @ (moved.transpose(1, 2) @ self._patches)
        if "bias" in self.parts:
            bend = bend + bent.sum(dim=2, keepdim=True)
        return self._folded(weights * back), self._unflat(weights * bend)

    def _parts(self, weight: Tensor, bias: Tensor, lead: tuple[int, ...]) -> Update:
        found = {"weight": weight.reshape(*lead, *self.module.weight.shape)}
        return found | ({"bias": bias.reshape(*lead, -1)} if "bias" in self.parts else {})

    @property
    def _window(self) -> dict[str, Any]:
        names = ("kernel_size", "dilation", "padding", "stride")
        return {name: getattr(self.module, name) for name in names}

    def _unfolded(self, inputs: Tensor) -> Tensor:
        """Patches `(m, K, P)` of inputs `(m, n, ...)`."""
        if isinstance(self.module, nn.Linear):
            return inputs.flatten(1, -2).transpose(1, 2)
        columns = unfold(inputs.flatten(0, 1), **self._window)
        return columns.view(*inputs.shape[:2], *columns.shape[1:]).transpose(1, 2).flatten(2)

    def _folded(self, patches: Tensor) -> Tensor:
        """The adjoint of `_unfolded`."""
        m, n = len(patches), self._input_shape[0]
        if isinstance(self.module, nn.Linear):
            return patches.transpose(1, 2).reshape(m, *self._input_shape)
        columns = patches.view(m, -1, n, patches.shape[2] // n).transpose(1, 2).flatten(0, 1)
        return fold(columns, self._input_shape[2:], **self._window).view(m, *self._input_shape)

    def _flat(self, slopes: Tensor) -> Tensor:
        """Derivatives `(m, o, P)` in outputs `(m, n, ...)`."""
        if isinstance(self.module, nn.Linear):
            return slopes.flatten(1, -2).transpose(1, 2)
        return slopes.flatten(3).transpose(1, 2).flatten(2)

    def _unflat(self, slopes: Tensor) -> Tensor:
        """The adjoint of `_flat`."""
        m, n = len(slopes), self._slope_shape[0]
        if isinstance(self.module, nn.Linear):
            return slopes.transpose(1, 2).reshape(m, *self._slope_shape)
        return slopes.view(m, len(slopes[0]), n, -1).transpose(1, 2).reshape(m, *self._slope_shape)
