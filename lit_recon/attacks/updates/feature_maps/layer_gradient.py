"""The gradient of a convolution's weights as a function of its input, behind which everything is known.

It is the sum over examples and positions of the derivative in the output times the input patch. A norm with statistics
of the batch or of the example makes that derivative depend on the input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_recon.attacks.updates.feature_maps.convolutions import Convolution


@dataclass(frozen=True)
class Statistics:
    """Mean and variance by which a norm divides: of the batch, or per example over `groups` groups of channels.

    Attributes:
        groups: of channels; None for statistics of the batch, with one group per channel.
        eps: added to the variance.
    """

    groups: int | None
    eps: float

    def mean(self, values: Tensor) -> Tensor:
        """Of `values (n, c, h, w)`, such that it can be subtracted from them."""
        if self.groups is None:
            return values.mean((0, 2, 3), keepdim=True)
        n, c = values.shape[:2]
        means = values.reshape(n, self.groups, -1).mean(2)
        return means.repeat_interleave(c // self.groups, 1)[:, :, None, None]

    def normalized(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized outputs of the convolution, and the factor that normalizes them."""
        centred = outputs - self.mean(outputs)
        factor = (self.mean(centred.square()) + self.eps).rsqrt()
        return centred * factor, factor

    def backward(self, outputs: Tensor, derivative: Tensor) -> Tensor:
        """Derivative in the convolution's outputs from that in their normalized values; symmetric in the latter."""
        normalized, factor = self.normalized(outputs)
        return factor * (derivative - self.mean(derivative) - normalized * self.mean(derivative * normalized))

    def change(self, outputs: Tensor, derivative: Tensor, moved: Tensor) -> Tensor:
        """First-order change of `backward` when the outputs move."""
        normalized, factor = self.normalized(outputs)
        turned = self.backward(outputs, moved)
        inner = turned * self.mean(derivative * normalized) + normalized * self.mean(derivative * turned)
        return -factor * (self.mean(normalized * moved) * self.backward(outputs, derivative) + inner)

    def change_transposed(self, outputs: Tensor, derivative: Tensor, other: Tensor) -> Tensor:
        """The transpose of `change` in `moved`."""
        normalized, factor = self.normalized(outputs)
        inner = other * self.mean(derivative * normalized) + derivative * self.mean(normalized * other)
        stretched = normalized * self.mean(self.backward(outputs, derivative) * other)
        return -factor * (stretched + self.backward(outputs, inner))


@dataclass(frozen=True)
class Known:
    """What is known about one convolution.

    Attributes:
        layer: the convolution.
        weight, bias: its parameters; the bias is None or `(channels,)`.
        gradient: observed, of its weight.
        derivative: of the loss in its output or, with `statistics`, in the normalized output; `(n, channels, h, w)`.
        statistics: of the norm behind; None where there is none, or one with fixed statistics.
    """

    layer: Convolution
    weight: Tensor
    bias: Tensor | None
    gradient: Tensor
    derivative: Tensor
    statistics: Statistics | None

    def outputs(self, maps: Tensor) -> Tensor:
        return nn.functional.conv2d(maps, self.weight, self.bias, self.layer.stride, self.layer.padding)

    def backward(self, maps: Tensor, derivative: Tensor) -> Tensor:
        """Derivative in the output for input maps."""
        return derivative if self.statistics is None else self.statistics.backward(self.outputs(maps), derivative)

    def patches(self, maps: Tensor) -> Tensor:
        """`(n, c kernel, places)`."""
        return self.layer.patches(maps)

    def predicted(self, maps: Tensor) -> Tensor:
        """The weight's gradient for input maps, differentiable in them."""
        derivative = self.backward(maps, self.derivative)
        return torch.einsum("nop,nkp->ok", derivative.flatten(2), self.patches(maps)).view_as(self.weight)

    @property
    def taps(self) -> int:
        return self.layer.kernel[0] * self.layer.kernel[1]


class Linearized:
    """The linear part of a convolution's weight gradient at input maps, as equations, and its transpose."""

    def __init__(self, known: Known, maps: Tensor) -> None:
        self.known, self.patches = known, known.patches(maps)
        self.outputs = known.outputs(maps)
        self.derivative = known.backward(maps, known.derivative)

    def __call__(self, change: Tensor) -> Tensor:
        one = self.known
        inner = nn.functional.conv2d(change, one.weight, None, one.layer.stride, one.layer.padding)
        found = torch.einsum("nop,nkp->ok", self.derivative.flatten(2), one.patches(change))
        if one.statistics is not None:
            turned = one.statistics.change(self.outputs, one.derivative, inner)
            found = found + torch.einsum("nop,nkp->ok", turned.flatten(2), self.patches)
        return rows_of(found.view_as(one.weight))

    def transposed(self, rows: Tensor) -> Tensor:
        one = self.known
        kernels = rows_to_kernels(rows, one.layer.channels)
        patches = torch.einsum("ok,nop->nkp", kernels, self.derivative.flatten(2))
        if one.statistics is not None:
            inner = torch.einsum("ok,nkp->nop", kernels, self.patches).view_as(self.outputs)
            turned = one.statistics.change_transposed(self.outputs, one.derivative, inner)
            patches = patches + torch.einsum("ok,nop->nkp", one.weight.flatten(1), turned.flatten(2))
        geometry = {"kernel_size": one.layer.kernel, "padding": one.layer.padding, "stride": one.layer.stride}
        return nn.functional.fold(patches, one.layer.shape[1:], **geometry)


def rows_of(tensor: Tensor) -> Tensor:
    """Gradients `(channels, c, rows, columns)` as equations `(channels kernel, c)`."""
    return tensor.permute(0, 2, 3, 1).flatten(0, 2)


def rows_to_kernels(rows: Tensor, channels: int) -> Tensor:
    """Equations `(channels kernel, c)` as `(channels, c kernel)`, the order of patches."""
    return rows.reshape(channels, -1, rows.shape[1]).transpose(1, 2).flatten(1)
