"""Gradients of the single examples of a batch, held layer by layer as two factors, from one pass over the batch.

The gradient of a linear map's weights is the product of its inputs and the derivatives in its outputs. Norms of single
gradients, and weighted sums over the batch, follow from these without any single gradient: by inner products where
they are fewer than the weights, see [Goodfellow2015] for fully connected layers, [Bu2022] for convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_recon.records import Update


class Factors(NamedTuple):
    """A layer, the type of its weights, its inputs, and the derivatives of the summed loss in its outputs."""

    layer: nn.Module
    dtype: torch.dtype
    inputs: Tensor
    derivatives: Tensor

    def squared_norms(self) -> Tensor:
        """Squared norms `(n,)` of the gradients of single examples in the layer's parameters."""
        layer: Any = self.layer
        derivatives = self.derivatives
        if isinstance(layer, nn.GroupNorm):
            scale, shift = _affine(layer, _precise(self.inputs), _precise(derivatives))
            return scale.square().sum(1) + shift.square().sum(1)
        inputs = self.inputs.to(derivatives)
        if isinstance(layer, nn.Conv2d):
            settings: Any = layer.kernel_size, layer.dilation, layer.padding, layer.stride
            rows, columns = derivatives.flatten(2), nn.functional.unfold(inputs, *settings)
        else:
            rows, columns = (part.reshape(len(part), -1, part.shape[-1]).mT for part in (derivatives, inputs))
        n_out, n_in, places = rows.shape[1], columns.shape[1], rows.shape[2]
        if places * (n_out + n_in) < n_out * n_in:
            squared = (_precise(rows.mT @ rows) * _precise(columns.mT @ columns)).sum((1, 2))
        else:
            squared = _precise(rows @ columns.mT).square().sum((1, 2))
        return squared if layer.bias is None else squared + _precise(rows).sum(2).square().sum(1)

    def weighted(self, weights: Tensor) -> dict[str, Tensor]:
        """The sum of the gradients of single examples with these weights `(n,)`, by parameter of the layer."""
        layer: Any = self.layer
        shape = (-1, *[1] * (self.derivatives.dim() - 1))
        derivatives = self.derivatives * weights.view(shape).to(self.derivatives)
        inputs = self.inputs.to(derivatives)
        if isinstance(layer, nn.GroupNorm):
            weight, bias = (part.sum(0) for part in _affine(layer, _precise(inputs), _precise(derivatives)))
        elif isinstance(layer, nn.Conv2d):
            kernel = derivatives.new_empty(layer.weight.shape)  # the layer's own weights may be on another device
            settings: Any = None, layer.stride, layer.padding, layer.dilation, False, (0, 0), 1, (False, True, False)
            weight = torch.ops.aten.convolution_backward(derivatives, inputs, kernel, *settings)[1]
            bias = _precise(derivatives).sum((0, 2, 3))
        else:
            rows, columns = (part.reshape(-1, part.shape[-1]) for part in (derivatives, inputs))
            weight, bias = rows.mT @ columns, _precise(rows).sum(0)
        found = {"weight": weight.to(self.dtype)}
        return found if layer.bias is None else {**found, "bias": bias.to(self.dtype)}


def _precise(tensor: Tensor) -> Tensor:
    """In float32 at least: sums of bfloat16 lose the small terms."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _affine(layer: nn.GroupNorm, inputs: Tensor, derivatives: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients `(n, channels)` of single examples in a norm's scale and shift."""
    normalized = nn.functional.group_norm(inputs, layer.num_groups, eps=layer.eps)
    return (derivatives * normalized).flatten(2).sum(2), derivatives.flatten(2).sum(2)


class ExampleGradients:
    """The gradients of single examples in all parameters of a model.

    Args:
        factors: by name of the layer.
        names: of all parameters, in the order of an update.
    """

    def __init__(self, factors: dict[str, Factors], names: list[str]) -> None:
        self._factors, self._names = factors, names

    def squared_norms(self) -> Tensor:
        """Squared norms `(n,)` of the gradients, over all parameters."""
        return torch.stack([own.squared_norms() for own in self._factors.values()]).sum(0)

    def weighted(self, weights: Tensor) -> Update:
        """The sum of the gradients with these weights `(n,)`."""
        found = {
            f"{name}.{key}" if name else key: value
            for name, own in self._factors.items()
            for key, value in own.weighted(weights).items()
        }
        return {name: found[name] for name in self._names}


def example_gradients(model: nn.Module, loss: Callable[[], Tensor], n: int) -> ExampleGradients | None:
    """The gradients of the `n` examples of whose losses `loss()` is the mean, as it runs `model`.

    None if a parameter is of another layer than a linear one, a convolution without groups or a GroupNorm, or of
    several layers, if a layer is not used exactly once, if its output is overwritten, or if it takes other than `n`
    inputs, such as the patches of all examples. The first axis of a layer's inputs must be that of the examples, no
    example may depend on another, and nothing but its layer may use a parameter.
    """
    layers = {name: layer for name, layer in model.named_modules() if any(True for _ in layer.parameters(False))}
    n_parameters = sum(1 for layer in layers.values() for _ in layer.parameters(False))
    if not all(map(_is_known, layers.values())) or n_parameters != len(list(model.parameters())):
        return None
    seen: dict[str, list[tuple[torch.dtype, Tensor, Tensor, int]]] = {name: [] for name in layers}

    def keep(name: str) -> Callable[..., Tensor | None]:
        def hook(layer: Any, given: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            first = not output.requires_grad
            output.requires_grad_()
            seen[name].append((layer.weight.dtype, given[0].detach(), output, output._version))
            return output.clone() if first else None  # a leaf may not be overwritten

        return hook

    hooks = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
    try:
        with torch.enable_grad():
            total = loss() * n
    finally:
        for one in hooks:
            one.remove()
    if any(len(passes) != 1 or passes[0][2]._version != passes[0][3] for passes in seen.values()):
        return None
    if any(len(passes[0][1]) != n for passes in seen.values()):
        return None
    dtypes, inputs, outputs, _ = zip(*(passes[0] for passes in seen.values()), strict=True)
    derivatives = torch.autograd.grad(total, outputs, materialize_grads=True)
    pieces = zip(layers, layers.values(), dtypes, inputs, derivatives, strict=True)
    found = {name: Factors(*own) for name, *own in pieces}
    return ExampleGradients(found, [name for name, _ in model.named_parameters()])


def _is_known(layer: nn.Module) -> bool:
    if not {name for name, _ in layer.named_parameters(recurse=False)} <= {"weight", "bias"}:
        return False  # the weight is computed from others, as by `torch.nn.utils.spectral_norm`
    if isinstance(layer, nn.Conv2d) and type(layer).forward is nn.Conv2d.forward:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer).forward in (nn.Linear.forward, nn.GroupNorm.forward)
