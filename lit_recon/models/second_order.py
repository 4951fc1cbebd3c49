"""Convolutions and BatchNorm whose derivatives of gradients take few passes over memory.

PyTorch differentiates the gradient of BatchNorm, and that of a convolution, through many small operations on whole
feature maps. Here every step is one or two of its fused kernels, maps keep their channels last, and what does not
depend on the direction of a derivative is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode


class SecondOrder(TorchFunctionMode):
    """While entered, layers compute so that the derivatives of a gradient in the images are fast.

    The loss and its gradient, with `create_graph`, are computed inside, and that gradient is differentiated outside: a
    backward pass `J^T u` in the images, then any number of `J v` by a backward pass in `u`. Further derivatives, or
    those in the weights, are wrong. Results differ from those of PyTorch by rounding only. Layers of other kinds, and
    weights that were computed from others, are left to PyTorch.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Whether gradients are still those of the loss.
        self.first = True

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.first = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACEMENTS.get(func)
        result = None if replacement is None else replacement(self, *args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def _view(mode: SecondOrder, tensor: Tensor, *shape: Any, **kwargs: Any) -> Tensor | None:
    """A view may not exist where channels are last."""
    return tensor.reshape(*shape) if shape and not isinstance(shape[0], torch.dtype) and not kwargs else None


def _conv2d(
    mode: SecondOrder,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor | None:
    if input.dim() != 4 or isinstance(padding, str) or not weight.is_leaf:
        return None
    geometry = _Geometry(_pair(stride), _pair(padding), _pair(dilation), groups)
    device = input.device.type
    if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
        lower = torch.get_autocast_dtype(device)
        input, weight = input.to(lower), weight.to(lower)  # noqa: A001
        bias = None if bias is None else bias.to(lower)
    layer: Any = _Convolution.apply  # untyped in PyTorch
    out: Tensor = layer(_channels_last(input), _channels_last(weight), geometry, mode)
    return out if bias is None else out + bias[:, None, None]


def _batch_norm(
    mode: SecondOrder,
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    pure = running_mean is None and running_var is None
    if not (training and pure and input.dim() == 4 and weight is not None and bias is not None):
        return None
    if not (weight.is_leaf and bias.is_leaf):
        return None
    layer: Any = _BatchNorm.apply
    out: Tensor = layer(_channels_last(input), weight, bias, eps, mode)
    return out


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    torch.Tensor.view: _view,
    torch.nn.functional.conv2d: _conv2d,
    torch.nn.functional.batch_norm: _batch_norm,
}


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _unfilled(shape: torch.Size, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    first, last = (value, value) if isinstance(value, int) else (value[0], value[-1])
    return first, last


class _Geometry(NamedTuple):
    """Settings of a convolution."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def forward(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """The convolution."""
        return _channels_last(
            torch.ops.aten.convolution(
                inputs, weight, None, self.stride, self.padding, self.dilation, False, (0, 0), self.groups
            )
        )

    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """Its adjoint in the inputs, of the given shape."""
        inputs = _unfilled(shape, gradient)
        return _channels_last(self._backward(gradient, inputs, weight, (True, False, False))[0])

    def weight_gradient(self, inputs: Tensor, gradient: Tensor, shape: torch.Size) -> Tensor:
        """Its adjoint in the weights, of the given shape."""
        n_out, n_in, height, width = shape
        if self.groups == 1 and self.dilation == (1, 1) and shape.numel() > gradient.numel():
            # a small map under many kernels is a single product of matrices, several times as fast
            vertical, horizontal = self.padding
            padded = torch.nn.functional.pad(
                inputs.permute(0, 2, 3, 1), (0, 0, horizontal, horizontal, vertical, vertical)
            )
            patches = padded.unfold(1, height, self.stride[0]).unfold(2, width, self.stride[1])
            columns = patches.permute(0, 1, 2, 4, 5, 3).reshape(-1, height * width * n_in)
            rows = gradient.permute(0, 2, 3, 1).reshape(-1, n_out)
            return (rows.t() @ columns).view(n_out, height, width, n_in).permute(0, 3, 1, 2)
        weight = _unfilled(shape, gradient)
        return _channels_last(self._backward(gradient, inputs, weight, (False, True, False))[1])

    def _backward(self, gradient: Tensor, inputs: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> Any:
        return torch.ops.aten.convolution_backward(
            _channels_last(gradient),
            inputs,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0, 0),
            self.groups,
            wanted,
        )


class _Convolution(Function):
    """The layer: its gradient is that of the loss at first, then a linear map of what flows back to the images."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, geometry: _Geometry, mode: SecondOrder) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.geometry, ctx.mode = geometry, mode
        return geometry.forward(inputs, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs, weight = ctx.saved_tensors
        backward, correlate = _to_inputs(), _to_weight()
        gx = backward(gradient, weight.detach(), inputs.shape, ctx.geometry) if ctx.needs_input_grad[0] else None
        wanted = ctx.needs_input_grad[1] and ctx.mode.first
        gw = correlate(inputs, gradient, weight.shape, ctx.geometry) if wanted else None
        return gx, gw, None, None


def _to_outputs() -> Any:
    return _ToOutputs.apply


def _to_inputs() -> Any:
    return _ToInputs.apply


def _to_weight() -> Any:
    return _ToWeight.apply


class _ToOutputs(Function):
    """The convolution, of one factor that is constant and one that is not."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, geometry: _Geometry) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.geometry = geometry
        return geometry.forward(inputs, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs, weight = ctx.saved_tensors
        to_inputs, to_weight = ctx.needs_input_grad[:2]
        gx = _to_inputs()(gradient, weight.detach(), inputs.shape, ctx.geometry) if to_inputs else None
        gw = _to_weight()(inputs.detach(), gradient, weight.shape, ctx.geometry) if to_weight else None
        return gx, gw, None


class _ToInputs(Function):
    """A convolution's adjoint in its inputs; derivatives hold the other factor constant."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, weight: Tensor, shape: torch.Size, geometry: _Geometry) -> Tensor:
        ctx.save_for_backward(gradient, weight)
        ctx.geometry = geometry
        return geometry.input_gradient(gradient, weight, shape)

    @staticmethod
    def backward(ctx: Any, inputs: Tensor) -> tuple[Any, ...]:
        gradient, weight = ctx.saved_tensors
        inputs = _channels_last(inputs)
        to_gradient, to_weight = ctx.needs_input_grad[:2]
        gg = _to_outputs()(inputs, weight.detach(), ctx.geometry) if to_gradient else None
        gw = _to_weight()(inputs, gradient.detach(), weight.shape, ctx.geometry) if to_weight else None
        return gg, gw, None, None


class _ToWeight(Function):
    """A convolution's adjoint in its weights; derivatives hold the other factor constant."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, gradient: Tensor, shape: torch.Size, geometry: _Geometry) -> Tensor:
        ctx.save_for_backward(inputs, gradient)
        ctx.geometry = geometry
        return geometry.weight_gradient(inputs, gradient, shape)

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:
        inputs, gradient = ctx.saved_tensors
        weight = _channels_last(weight)
        to_inputs, to_gradient = ctx.needs_input_grad[:2]
        gx = _to_inputs()(gradient.detach(), weight, inputs.shape, ctx.geometry) if to_inputs else None
        gg = _to_outputs()(inputs.detach(), weight, ctx.geometry) if to_gradient else None
        return gx, gg, None, None


class _Statistics(NamedTuple):
    """What the derivatives of BatchNorm share: its inputs, their mean and inverse standard deviation, the weights."""

    inputs: Tensor
    mean: Tensor
    inverse: Tensor
    weight: Tensor

    def project(self, values: Tensor, scaled: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients in inputs, weights and biases for `values` in place of the gradient in the outputs.

        The first, a symmetric map, is `weight * inverse` times the values without their components along 1 and along
        the normalized inputs; or without the factor `weight`. The others are sums of values times normalized inputs
        and of values.
        """
        weight = self.weight if scaled else None
        return self._backward(_channels_last(values), self.inputs, self.mean, self.inverse, weight, True)

    def sums(self, values: Tensor, others: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sums of values times normalized inputs, or times `others`, and of values."""
        if others is None:
            found = self._backward(values, self.inputs, self.mean, self.inverse, self.weight, False)
        else:
            zero, one = torch.zeros_like(self.mean), torch.ones_like(self.mean)
            found = self._backward(values, others, zero, one, self.weight, False)
        return found[1], found[2]

    def normalized(self) -> Tensor:
        """The normalized inputs."""
        return _affine(self.inputs, self.inverse, -self.mean * self.inverse)

    @staticmethod
    def _backward(
        values: Tensor, inputs: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward(
            values, inputs, weight, None, None, mean, inverse, True, 0.0, [first, True, True]
        )
        return result


def _affine(values: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Values `(n, f, h, w)` times `scale` plus `shift`, each `(f,)`, in the type of the values."""
    return torch.addcmul(_per_channel(shift, values), values, _per_channel(scale, values))


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Values `(f,)` for maps `(n, f, h, w)`, in their type: mixed types take several times as long."""
    return values.to(like.dtype)[:, None, None]


class _BatchNorm(Function):
    """The layer, with the statistics of the batch."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, eps: float, mode: SecondOrder) -> Tensor:
        out: Tensor
        out, mean, inverse = torch.ops.aten.native_batch_norm(inputs, weight, bias, None, None, True, 0.0, eps)
        ctx.save_for_backward(inputs, weight, mean, inverse)
        ctx.mode = mode
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs, weight, mean, inverse = ctx.saved_tensors
        statistics = _Statistics(inputs.detach(), mean, inverse, weight.detach())
        if ctx.mode.first:
            first: Any = _BatchNormGradient.apply
            return (*first(gradient, inputs, statistics), None, None)
        later: Any = _Projected.apply
        return later(gradient, statistics), None, None, None, None


class _Projected(Function):
    """The gradient of BatchNorm in its inputs: linear, and its own adjoint."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, statistics: _Statistics) -> Tensor:
        ctx.statistics = statistics
        return statistics.project(gradient)[0]

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> tuple[Any, ...]:
        again: Any = _Projected.apply
        return again(direction, ctx.statistics), None


class _BatchNormGradient(Function):
    """The gradients of BatchNorm in inputs, weights and biases."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, inputs: Tensor, statistics: _Statistics) -> tuple[Tensor, Tensor, Tensor]:
        found, to_weight, to_bias = statistics.project(gradient, scaled=False)
        ctx.statistics, ctx.projected, ctx.to_weight = statistics, found, to_weight
        return found * _per_channel(statistics.weight, found), to_weight, to_bias

    @staticmethod
    def backward(ctx: Any, along: Tensor, along_weight: Tensor, along_bias: Tensor) -> tuple[Any, ...]:
        transposed: Any = _Transposed.apply
        return (*transposed(along, along_weight, along_bias, ctx.statistics, ctx.projected, ctx.to_weight), None)


class _Transposed(Function):
    """The adjoint of the derivative of `_BatchNormGradient` in the gradient and the inputs of the layer.

    With `P` the projection of `_Statistics.project`, normalized inputs `h`, inverse standard deviation `r`, weights `w`
    and `q = r P(g)` of the gradient `g`, a change `x'` of the inputs changes `w q`, the gradient in the inputs, by
    `w r (P(g' - c x' - mean(h x') q) - mean(q x') h)` for `c = r mean(h g)` and a change `g'` of the gradient, and that
    in the weights by the sum of `h g' + q x'`. All is linear, and `backward` is this map.
    """

    @staticmethod
    def forward(
        ctx: Any,
        along: Tensor,
        along_weight: Tensor,
        along_bias: Tensor,
        statistics: _Statistics,
        projected: Tensor,
        to_weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        along = _channels_last(along)
        count = along.numel() // along.shape[1]
        normalized = statistics.normalized()
        c = statistics.inverse * to_weight / count
        ctx.statistics, ctx.projected, ctx.normalized, ctx.c, ctx.count = statistics, projected, normalized, c, count
        ctx.projected_normalized, _ = statistics.sums(projected)
        scale = statistics.weight * statistics.inverse / count
        mapped, along_normalized, _ = statistics.project(along)
        along_projected, _ = statistics.sums(along, projected)
        to_gradient = mapped + _affine(normalized, along_weight, along_bias)
        to_inputs = projected * _per_channel(along_weight - scale * along_normalized, projected)
        to_inputs.addcmul_(mapped, _per_channel(-c, mapped))
        to_inputs.addcmul_(normalized, _per_channel(-scale * along_projected, normalized))
        return to_gradient, to_inputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, inputs: Tensor) -> tuple[Any, ...]:
        statistics, projected, count = ctx.statistics, ctx.projected, ctx.count
        inputs = _channels_last(inputs)
        inputs_normalized, inputs_sum = statistics.sums(inputs)
        inputs_projected, _ = statistics.sums(inputs, projected)
        # as they enter the sum, so that the same can be taken off again below
        c, along = _per_channel(-ctx.c, inputs), _per_channel(-inputs_normalized / count, inputs)
        changed = torch.addcmul(gradient, inputs, c).addcmul_(projected, along)
        found, to_weight, to_bias = statistics.project(changed)
        c, along = c.flatten().to(ctx.c.dtype), along.flatten().to(ctx.c.dtype)
        # q is its own projection up to a small component along h, since the constant under the root keeps mean(h h) < 1
        rest = inputs_projected - along * ctx.projected_normalized
        scale = statistics.weight * statistics.inverse / count
        found.addcmul_(ctx.normalized, _per_channel(-scale * rest, found))
        to_weight = to_weight - c * inputs_normalized + rest
        return found, to_weight, to_bias - c * inputs_sum, None, None, None
