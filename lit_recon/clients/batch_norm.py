"""A private copy of a model in which BatchNorm is a pure function, so that a client's rule has no side effects.

`torch.nn.BatchNorm2d` updates its running statistics while it runs, which neither `torch.func` nor an attacker who
simulates a client may do. The copies here read the same parameters and buffers by the same names and write nothing.
In evaluation mode the layer is one multiply-add with per-channel coefficients: the same function, and much cheaper to
differentiate twice.
"""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lit_recon.errors import UnsupportedModelError
from lit_recon.records import LayerStatistics

BatchNormMode = Literal["eval", "train"]


def input_statistics(inputs: Tensor) -> LayerStatistics:
    """Mean and biased variance per channel of a layer input `(n, f, ...)`."""
    axes = [axis for axis in range(inputs.dim()) if axis != 1]
    var, mean = torch.var_mean(inputs, dim=axes, correction=0)
    return LayerStatistics(mean=mean, var=var)


class PureBatchNorm(nn.Module):
    """BatchNorm without side effects; `recorded` holds the last input's statistics while `recording` is on."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, source: _BatchNorm, mode: BatchNormMode) -> None:
        super().__init__()
        self.mode, self.eps = mode, source.eps
        self.register_parameter("weight", source.weight)
        self.register_parameter("bias", source.bias)
        for name, buffer in source.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.recording = False
        self.recorded: LayerStatistics | None = None

    def take_recorded(self) -> LayerStatistics:
        """The statistics recorded since recording was switched on."""
        if self.recorded is None:
            raise UnsupportedModelError("a BatchNorm layer was not reached by the forward pass; remove unused layers")
        return self.recorded

    def forward(self, inputs: Tensor) -> Tensor:
        if self.recording:
            self.recorded = input_statistics(inputs)
        if self.mode == "train":
            return nn.functional.batch_norm(inputs, None, None, self.weight, self.bias, training=True, eps=self.eps)
        scale = torch.rsqrt(self.running_var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -self.running_mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        shape = (1, -1) + (1,) * (inputs.dim() - 2)
        return torch.addcmul(shift.view(shape), inputs, scale.view(shape))


def pure_copy(model: nn.Module, mode: BatchNormMode) -> nn.Module:
    """A deep copy of `model` with every BatchNorm replaced by a `PureBatchNorm`, all else in evaluation mode.

    A BatchNorm layer without running statistics always uses the statistics of the batch, as PyTorch's does.
    """
    copied = copy.deepcopy(model).eval()
    for parent in copied.modules():
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm):
                setattr(parent, name, PureBatchNorm(child, mode if child.running_mean is not None else "train"))
    for parameter in copied.parameters():
        parameter.requires_grad_(False)
    return copied
