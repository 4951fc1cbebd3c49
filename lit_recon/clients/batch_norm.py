"""A copy of a model without side effects, as `torch.func` and second derivatives need it.

`torch.nn.BatchNorm2d` updates its running statistics in the forward pass, and in-place activations overwrite their
inputs. The copy reads the same parameters and buffers by the same names and writes nothing. In evaluation mode a
BatchNorm layer of the copy is one multiply-add with per-channel coefficients: the same function, and much cheaper to
differentiate twice.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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
    """A deep copy of `model` in evaluation mode, with pure BatchNorm layers and without in-place activations.

    A BatchNorm layer without running statistics always uses the statistics of the batch, as PyTorch's does. Subclasses
    of BatchNorm with a forward of their own (as in timm: BatchNorm and activation in one) stay what they are.
    """
    copied = copy.deepcopy(model).eval()
    parent: Any
    for parent in list(copied.modules()):
        if getattr(parent, "inplace", None) is True:
            parent.inplace = False
        for name, child in parent.named_children():
            if not isinstance(child, _BatchNorm):
                continue
            if type(child).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                setattr(parent, name, PureBatchNorm(child, mode if child.running_mean is not None else "train"))
            else:
                _purify(child, mode)
    for parameter in copied.parameters():
        parameter.requires_grad_(False)
    return copied


def recording_layers(copied: nn.Module) -> dict[str, Any]:
    """BatchNorm layers of a pure copy by name: those with the attributes `recording` and `recorded`."""
    return {name: layer for name, layer in copied.named_modules() if hasattr(layer, "recording")}


def _purify(layer: Any, mode: BatchNormMode) -> None:
    """Make a BatchNorm layer with a forward of its own write no running statistics, and record like `PureBatchNorm`."""
    layer.training, layer.track_running_stats = mode == "train", mode == "eval"
    layer.recording, layer.recorded = False, None
    layer.register_forward_pre_hook(_record)


def _record(layer: Any, given: tuple[Tensor, ...]) -> None:
    if layer.recording:
        layer.recorded = input_statistics(given[0])
