"""The convolutions of a public model whose released gradients may give their input maps away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_recon.observation.norms import pure_copy
from lit_recon.records import Observation

#: Noise images that are sent through the public model to see what its layers are given.
_PROBES = 4


@dataclass(frozen=True)
class Convolution:
    """A 2-d convolution and what enters it.

    Attributes:
        name: of the module.
        shape: `(c, h, w)` of an input map.
        channels: of its output.
        kernel, stride, padding: `(rows, columns)`.
        places: `P`, positions of the kernel on one map.
        sparse: inputs are never below zero and often zero, as behind a ReLU.
    """

    name: str
    shape: tuple[int, int, int]
    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    places: int
    sparse: bool

    @property
    def patch_size(self) -> int:
        """Entries of the patch under the kernel."""
        return self.shape[0] * self.kernel[0] * self.kernel[1]

    @property
    def overlaps(self) -> bool:
        """Whether neighbouring patches share entries in both directions."""
        return self.kernel[0] > self.stride[0] and self.kernel[1] > self.stride[1]

    @property
    def every_step(self) -> bool:
        """Whether the kernel stops at every entry."""
        return self.stride == (1, 1)

    def holds(self, n_examples: int) -> bool:
        """Whether the gradient can have one independent row for every patch of so many maps."""
        return self.places * n_examples <= min(self.channels, self.patch_size - 1)


def find_convolutions(observation: Observation) -> list[Convolution]:
    """Plain convolutions that every image passes once, in the order in which it does."""
    model = pure_copy(observation.model, "eval")
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def listen(name: str, module: nn.Module) -> None:
        def note(_: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
            calls.setdefault(name, []).append((given[0], returned))

        module.register_forward_hook(note)

    plain = {name: module for name, module in model.named_modules() if _is_plain(module)}
    for name, module in plain.items():
        listen(name, module)
    like = next(iter(observation.parameters.values()))
    images = torch.rand(_PROBES, *observation.image_shape, generator=torch.Generator().manual_seed(0)).to(like)
    with torch.no_grad():
        torch.func.functional_call(model, {**observation.parameters, **observation.buffers}, (images,))
    return [_described(name, plain[name], *seen[0]) for name, seen in calls.items() if len(seen) == 1]


def _is_plain(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Conv2d)
        and module.groups == 1
        and module.dilation == (1, 1)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def _described(name: str, module: nn.Module, inputs: Tensor, outputs: Tensor) -> Convolution:
    assert isinstance(module, nn.Conv2d)
    assert not isinstance(module.padding, str)
    c, h, w = inputs.shape[1:]
    return Convolution(
        name=name,
        shape=(c, h, w),
        channels=outputs.shape[1],
        kernel=(module.kernel_size[0], module.kernel_size[1]),
        stride=(module.stride[0], module.stride[1]),
        padding=(module.padding[0], module.padding[1]),
        places=outputs[0, 0].numel(),
        sparse=bool((inputs >= 0).all()) and bool((inputs == 0).double().mean() > 0.05),
    )
