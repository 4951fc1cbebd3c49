"""Derivatives of a network's gradient along directions of the images, in few passes over memory.

PyTorch differentiates the gradient of BatchNorm, and that of a convolution, through many small operations on whole
feature maps. Here each takes one or two of its fused kernels, maps keep their channels last, and what does not depend
on the direction is computed once. All other layers are left to PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode

from lit_recon.records import Update

_Map = Callable[[Tensor], Tensor]


def linearized(gradient: Callable[[Tensor], Update], images: Tensor) -> tuple[Update, Callable[[Tensor], Update]]:
    """The gradient at the images, and its derivative `J v` as a function of directions `v` of the images' shape.

    `gradient` computes the gradient of a loss in parameters by plain autograd, with `create_graph`. The results are
    those of PyTorch up to rounding, and cannot be differentiated.
    """
    # J^T u is linear in u, with derivative J v along v: its graph is built once, at u = 0, and every direction costs
    # one backward pass through it; forward-mode derivatives took several times as long on a CPU
    images = images.detach().requires_grad_()
    with torch.enable_grad():
        with _Layers():
            update = gradient(images)
        cotangents = [torch.zeros_like(value, requires_grad=True) for value in update.values()]
        (transposed,) = torch.autograd.grad(list(update.values()), images, cotangents, create_graph=True)

    def product(direction: Tensor) -> Update:
        parts = torch.autograd.grad(transposed, cotangents, direction, retain_graph=True, materialize_grads=True)
        return dict(zip(update, parts, strict=True))

    return {name: value.detach() for name, value in update.items()}, product


class _Layers(TorchFunctionMode):
    """While entered, convolutions and BatchNorm are those of this module.

    The gradient of the loss is taken inside. The first backward pass outside is that for `J^T u`, at `u = 0`: it makes
    a graph of zeros. All later ones go through that graph and make none.
    """

    def __init__(self) -> None:
        super().__init__()
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
        layer = _LAYERS.get(func)
        result = None if layer is None else layer(self, *args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def _view(mode: _Layers, tensor: Tensor, *shape: Any, **kwargs: Any) -> Tensor | None:
    """A view may not exist where channels are last."""
    return tensor.reshape(*shape) if shape and not isinstance(shape[0], torch.dtype) else None


def _conv2d(
    mode: _Layers,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor | None:
    """The convolution; None for weights that were computed, perhaps from the images, as after a local step."""
    if input.dim() != 4 or isinstance(padding, str) or not weight.is_leaf:
        return None
    kernel = _Kernel(_pair(stride), _pair(padding), _pair(dilation), groups)
    inputs, device = input, input.device.type
    if torch.is_autocast_enabled(device) and inputs.dtype != torch.float64:
        lower = torch.get_autocast_dtype(device)
        inputs, weight = inputs.to(lower), weight.to(lower)
        bias = None if bias is None else bias.to(lower)
    out: Tensor = _apply(_Convolution, _channels_last(inputs), _channels_last(weight), kernel, mode)
    return out if bias is None else out + bias[:, None, None]


def _batch_norm(
    mode: _Layers,
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """BatchNorm with the statistics of the batch; None for other forms."""
    if not training or running_mean is not None or input.dim() != 4:
        return None
    if weight is None or bias is None or not (weight.is_leaf and bias.is_leaf):
        return None
    out: Tensor = _apply(_BatchNorm, _channels_last(input), weight, bias, eps, mode)
    return out


_LAYERS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    torch.Tensor.view: _view,
    torch.nn.functional.conv2d: _conv2d,
    torch.nn.functional.batch_norm: _batch_norm,
}


def _apply(function: Any, *inputs: Any) -> Any:
    return function.apply(*inputs)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    first, last = (value, value) if isinstance(value, int) else (value[0], value[-1])
    return first, last


class _Kernel(NamedTuple):
    """The three linear maps of a convolution with these settings."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def outputs(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """The convolution."""
        settings = (self.stride, self.padding, self.dilation, False, (0, 0), self.groups)
        found = torch.ops.aten.convolution(_channels_last(inputs), _channels_last(weight), None, *settings)
        return _channels_last(found)

    def inputs(self, gradient: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        """Its adjoint in the inputs, of that shape."""
        return self._backward(gradient, _unfilled(shape, gradient), weight, 0)

    def weight(self, inputs: Tensor, gradient: Tensor, shape: torch.Size) -> Tensor:
        """Its adjoint in the weights, of that shape."""
        if self.groups != 1 or self.dilation != (1, 1) or shape.numel() <= gradient.numel():
            return self._backward(gradient, inputs, _unfilled(shape, gradient), 1)
        # of a small map and many weights: one product of matrices, several times as fast
        n_out, n_in, height, width = shape
        (vertical, horizontal), (down, right) = self.padding, self.stride
        margins = (0, 0, horizontal, horizontal, vertical, vertical)
        padded = torch.nn.functional.pad(inputs.permute(0, 2, 3, 1), margins)
        patches = padded.unfold(1, height, down).unfold(2, width, right).permute(0, 1, 2, 4, 5, 3)
        columns = patches.reshape(-1, height * width * n_in)
        rows = gradient.permute(0, 2, 3, 1).reshape(-1, n_out)
        return (rows.t() @ columns).view(n_out, height, width, n_in).permute(0, 3, 1, 2)

    def _backward(self, gradient: Tensor, inputs: Tensor, weight: Tensor, place: int) -> Tensor:
        settings = (None, self.stride, self.padding, self.dilation, False, (0, 0), self.groups)
        wanted = [place == 0, place == 1, False]
        found = torch.ops.aten.convolution_backward(
            _channels_last(gradient), _channels_last(inputs), _channels_last(weight), *settings, wanted
        )
        return _channels_last(found[place])


def _unfilled(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


class _Linear(Function):
    """A linear map to tensors of a shape, with its adjoint; zeros unless `filled`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shape: torch.Size, apply: _Map, adjoint: _Map, filled: bool) -> Tensor:
        ctx.shape, ctx.maps = values.shape, (adjoint, apply)
        return apply(values) if filled else values.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, values: Tensor) -> tuple[Any, ...]:
        filled = not torch.is_grad_enabled()
        return _apply(_Linear, values, ctx.shape, *ctx.maps, filled), None, None, None, None


class _Convolution(Function):
    """The layer. Its backward pass gives the gradient of the loss at first, then the way of `u` towards the images."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, kernel: _Kernel, mode: _Layers) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.kernel, ctx.mode = kernel, mode
        return kernel.outputs(inputs, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs, weight = ctx.saved_tensors
        kernel, first, shape, constant = ctx.kernel, ctx.mode.first, inputs.shape, weight.detach()
        to_inputs = to_weight = None
        if ctx.needs_input_grad[0]:
            to_inputs = _apply(
                _Linear,
                gradient,
                shape,
                lambda values: kernel.inputs(values, constant, shape),
                lambda values: kernel.outputs(values, constant),
                first,
            )
        if ctx.needs_input_grad[1] and first:
            to_weight = _apply(_WeightGradient, inputs, gradient, weight.shape, kernel)
        return to_inputs, to_weight, None, None


class _WeightGradient(Function):
    """The gradient of a convolution in its weights, linear in the inputs and in the gradient in the outputs."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, gradient: Tensor, shape: torch.Size, kernel: _Kernel) -> Tensor:
        ctx.save_for_backward(inputs, gradient)
        ctx.kernel = kernel
        return kernel.weight(inputs, gradient, shape)

    @staticmethod
    def backward(ctx: Any, values: Tensor) -> tuple[Any, ...]:
        kernel, (inputs, gradient) = ctx.kernel, (saved.detach() for saved in ctx.saved_tensors)
        to_inputs = to_gradient = None
        if ctx.needs_input_grad[0]:
            to_inputs = _apply(
                _Linear,
                values,
                inputs.shape,
                lambda weight: kernel.inputs(gradient, weight, inputs.shape),
                lambda along: kernel.weight(along, gradient, values.shape),
                False,
            )
        if ctx.needs_input_grad[1]:
            to_gradient = _apply(
                _Linear,
                values,
                gradient.shape,
                lambda weight: kernel.outputs(inputs, weight),
                lambda along: kernel.weight(inputs, along, values.shape),
                False,
            )
        return to_inputs, to_gradient, None, None


class _Statistics(NamedTuple):
    """What the derivatives of BatchNorm share: its inputs, their mean and inverse standard deviation, the weights."""

    inputs: Tensor
    mean: Tensor
    inverse: Tensor
    weight: Tensor

    def project(self, values: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """`weight * inverse * P(values)`, and per channel the sums of values times normalized inputs, and of values.

        `P(v) = v - mean(v) - h mean(h v)`, with normalized inputs `h`, is symmetric. With the gradient in the outputs
        these are the gradients in inputs, weights and biases.
        """
        return _kernel_of_batch_norm(_channels_last(values), self.inputs, self.mean, self.inverse, weight, True)

    def along_inputs(self, values: Tensor) -> Tensor:
        """The first part of `project`, with the layer's weights."""
        return self.project(values, self.weight)[0]

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The other parts of `project`."""
        return _kernel_of_batch_norm(values, self.inputs, self.mean, self.inverse, None, False)[1:]

    def inner(self, values: Tensor, others: Tensor) -> Tensor:
        """Sums of values times others, per channel."""
        zero, one = torch.zeros_like(self.mean), torch.ones_like(self.mean)
        return _kernel_of_batch_norm(values, others, zero, one, None, False)[1]

    def normalized(self) -> Tensor:
        """The normalized inputs."""
        scale, shift = (_per_channel(part, self.inputs) for part in (self.inverse, -self.mean * self.inverse))
        return torch.addcmul(shift, self.inputs, scale)


def _kernel_of_batch_norm(
    values: Tensor, inputs: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.ones_like(mean) if weight is None else weight  # without weights, a GPU computes no sums
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_batch_norm_backward(
        values, inputs, scale, None, None, mean, inverse, True, 0.0, [first, True, True]
    )
    return found


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Values `(f,)` for maps `(n, f, h, w)`, in their type: mixed types take several times as long."""
    return values.to(like.dtype)[:, None, None]


class _BatchNorm(Function):
    """The layer, with the statistics of the batch. Its backward pass is as that of `_Convolution`."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, eps: float, mode: _Layers) -> Tensor:
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
            return (*_apply(_BatchNormGradient, gradient, inputs, statistics), None, None)
        along = statistics.along_inputs
        return _apply(_Linear, gradient, inputs.shape, along, along, False), None, None, None, None


class _BatchNormGradient(Function):
    """The gradients of BatchNorm in inputs, weights and biases, of that in the outputs and the inputs."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, inputs: Tensor, statistics: _Statistics) -> tuple[Tensor, Tensor, Tensor]:
        projected, to_weight, to_bias = statistics.project(gradient, None)
        # detached: an output that its own node holds would keep the whole graph alive
        ctx.constants = statistics, projected, to_weight.detach()
        return projected * _per_channel(statistics.weight, projected), to_weight, to_bias

    @staticmethod
    def backward(ctx: Any, *along: Tensor) -> tuple[Any, ...]:
        return (*_apply(_BatchNormTangent, *along, *ctx.constants), None)


class _BatchNormTangent(Function):
    """The adjoint, at zero, of the derivative of `_BatchNormGradient`; its backward pass is that derivative.

    With `P` and `h` as in `_Statistics.project`, inverse standard deviation `r`, weights `w`, and `q = r P(g)` of the
    gradient `g` in the outputs: where `g` changes by `g'` and the inputs by `x'`, `h` changes by `r P(x')` and `r` by
    `-r^2 mean(h x')`. The gradient in the inputs, `w q`, then changes by

        w r (P(g' - c x' - mean(h x') q) - h (mean(q x') + mean(h x') mean(h q))),  c = r mean(h g),

    and that in the weights, the sum of `h g`, by the sum of `h g' + q x'`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor,
        statistics: _Statistics,
        projected: Tensor,
        to_weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        count = inputs.numel() // inputs.shape[1]
        c = statistics.inverse * to_weight / count
        ctx.constants = statistics, projected, statistics.normalized(), c, statistics.sums(projected)[0], count
        return inputs.new_zeros(()).expand(inputs.shape), inputs.new_zeros(()).expand(inputs.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, inputs: Tensor) -> tuple[Any, ...]:
        statistics, projected, normalized, c, h_q, count = ctx.constants
        inputs = _channels_last(inputs)
        h_x, sum_x = statistics.sums(inputs)
        # rounded as they enter the sum, so that the same can be taken off again below
        c, mean_h_x = c.to(inputs.dtype), (h_x / count).to(inputs.dtype)
        changed = torch.addcmul(gradient, inputs, -_per_channel(c, inputs))
        changed.addcmul_(projected, -_per_channel(mean_h_x, inputs))
        found, to_weight, to_bias = statistics.project(changed, statistics.weight)
        rest = statistics.inner(inputs, projected) + mean_h_x * h_q
        scale = statistics.weight * statistics.inverse / count
        found.addcmul_(normalized, -_per_channel(scale * rest, found))
        return found, to_weight + c * h_x + rest, to_bias + c * sum_x, None, None, None
