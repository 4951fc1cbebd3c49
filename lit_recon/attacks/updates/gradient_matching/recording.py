"""Functions whose kernels are recorded on a GPU, once, and launched together: a CUDA graph.

An attack iteration on a small batch is thousands of short kernels, and a GPU waits for Python to launch them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

#: Calls before the recording, in which libraries choose kernels and allocate.
_WARM_UP = 3
#: Recordings after which a function whose inputs keep changing shape is not recorded again: each costs several calls.
_MOST = 8


class Recorded:
    """A function of tensors that is recorded when it is first called on a GPU, and replayed by later calls.

    The function takes and returns pytrees of tensors without gradients. Between calls nothing but the values of its
    tensors may change, and it must neither wait for the device nor draw random numbers. Inputs of another shape are
    recorded in place of the last ones. A function that cannot be recorded, and one on a CPU, is called as it is.

    Attributes:
        refused: why it was not recorded; None: it was, or it was not called on a GPU yet.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.refused: str | None = None
        self._function = function
        self._layout: tuple[Any, ...] = ()
        self._recordings = 0
        self._graph: _Graph | None = None

    def __call__(self, *inputs: Any) -> Any:
        leaves, structure = tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self.refused is not None or not any(tensor.is_cuda for tensor in tensors):
            return self._function(*inputs)
        layout = (structure, *(_layout(leaf) for leaf in leaves))
        if self._graph is None or layout != self._layout:
            self._graph = None  # its memory first
            self._recordings += 1
            if self._recordings > _MOST:
                self.refused = f"inputs of more than {_MOST} shapes"
                return self._function(*inputs)
            try:
                self._graph, self._layout = _Graph(self._function, leaves, structure), layout
            except RuntimeError as error:
                self.refused = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                return self._function(*inputs)
        return self._graph.replay(tensors)


class DifferentiableRecorded:
    """A function of tensors to one tensor, recorded together with its derivative.

    The derivative is recorded as a function of its own, which computes the value again: on a GPU that waits for Python
    this costs little, and nothing has to be kept between the two. Conditions as for `Recorded`.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._value = Recorded(torch.no_grad()(function))
        self._derivative = Recorded(_derivative_of(function))

    @property
    def refused(self) -> str | None:
        """See `Recorded`."""
        return self._value.refused or self._derivative.refused

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        drawn: Tensor = _Replayed.apply(self._value, self._derivative, *inputs)  # type: ignore[no-untyped-call] # PyTorch does not type it
        return drawn


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Recorded, derivative: Recorded, *inputs: Tensor | None) -> Tensor:
        ctx.derivative = derivative
        ctx.save_for_backward(*inputs)
        result: Tensor = value(*inputs)
        return result

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor | None, ...]:
        gradients = iter(ctx.derivative(along, *ctx.saved_tensors))
        return (None, None, *(next(gradients) if needed else None for needed in ctx.needs_input_grad[2:]))


def _derivative_of(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor | None, ...]]:
    """(derivative of the result, inputs of the function) -> gradients of those that need one, None where not used."""

    def derivative(along: Tensor, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        leaves = [None if value is None else value.detach().requires_grad_(value.requires_grad) for value in inputs]
        with torch.enable_grad():
            result = function(*leaves)
        moved = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        return torch.autograd.grad(result, moved, along, allow_unused=True)

    return derivative


class _Graph:
    """One recording: places for the inputs, the graph, and the outputs' places."""

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Any], structure: Any) -> None:
        """A RuntimeError if something in the function cannot be recorded."""
        places = [_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._inputs = [place for place in places if isinstance(place, Tensor)]
        inputs = tree_unflatten(places, structure)
        device = next(place.device for place in self._inputs if place.is_cuda)
        with torch.cuda.device(device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UP):
                    function(*inputs)
                # what waits for the device would spoil a recording, and the device's random state with it
                with _waiting_refused():
                    function(*inputs)
            torch.cuda.current_stream().wait_stream(aside)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                outputs = function(*inputs)
        self._outputs = tree_map_only(Tensor, torch.detach, outputs)

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """The outputs for these inputs."""
        with torch.no_grad():
            torch._foreach_copy_(self._inputs, list(tensors))
        self._graph.replay()
        return tree_map_only(Tensor, torch.clone, self._outputs)


@contextlib.contextmanager
def _waiting_refused() -> Iterator[None]:
    """A RuntimeError for what waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _copy(tensor: Tensor) -> Tensor:
    """A place of its own with the same layout in memory, gradients and values."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _layout(leaf: Any) -> Any:
    """What a recording depends on."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return repr(leaf)
