"""The Jacobian of any small network's update with respect to its inputs, by automatic differentiation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lit_recon.bounds.fisher import DenseJacobian
from lit_recon.errors import ConfigError
from lit_recon.records import Update

#: Entries of a Jacobian that is stored, at most: 400 MB in double precision.
LARGEST = 50_000_000


def autograd_jacobian(
    function: Callable[[Tensor], Update], inputs: Tensor, chunk: int = 16, largest: int = LARGEST
) -> DenseJacobian:
    """The Jacobian of `function` at `inputs`, column by column.

    `J^T u` is linear in `u`, so that its own derivative along `v` is `J v`: both are taken in reverse mode, which every
    operation has, and `chunk` columns together. Columns are fewer than rows: pixels, not parameters.

    Args:
        function: from inputs to an update; built of operations that `torch.func` can transform. A client's operator
            has to be called with `functional=True`.
        inputs: of any shape; double precision where the information is to be inverted.
        chunk: columns at once.
        largest: entries allowed.

    Raises:
        ConfigError: the Jacobian would be larger, or `chunk` is below 1.

    >>> jacobian = autograd_jacobian(lambda x: {"w": x**2}, torch.tensor([1.0, 3.0]))
    >>> jacobian.rows["w"]
    tensor([[2., 0.],
            [0., 6.]])
    """
    if chunk < 1:
        raise ConfigError(f"a Jacobian needs chunks of at least 1 column; got {chunk}")
    released, pull_back, *_ = torch.func.vjp(function, inputs)
    update = {name: value.detach() for name, value in released.items()}
    rows, columns = sum(value.numel() for value in update.values()), inputs.numel()
    check_size(rows, columns, largest)
    nothing = {name: torch.zeros_like(value) for name, value in update.items()}
    _, forward, *_ = torch.func.vjp(lambda cotangent: pull_back(cotangent)[0], nothing)
    units = torch.eye(columns, dtype=inputs.dtype, device=inputs.device).view(columns, *inputs.shape)
    jacobian = {name: value.new_empty(value.numel(), columns) for name, value in update.items()}
    for start in range(0, columns, chunk):
        part = torch.func.vmap(lambda direction: forward(direction)[0])(units[start : start + chunk])
        for name, values in part.items():
            jacobian[name][:, start : start + chunk] = values.detach().flatten(1).T
    return DenseJacobian(update, jacobian)


def check_size(n_parameters: int, n_inputs: int, largest: int = LARGEST) -> None:
    """Refuse a Jacobian that would not fit.

    Raises:
        ConfigError: more than `largest` entries.
    """
    if n_parameters * n_inputs > largest:
        raise ConfigError(
            f"a Jacobian of {n_parameters:,} coordinates by {n_inputs:,} inputs has more than {largest:,} entries "
            f"(about {math.ceil(n_parameters * n_inputs * 8 / 1e9)} GB): take a smaller network, smaller images or "
            "smaller batches; two-layer networks have a closed form that stores none of it"
        )
