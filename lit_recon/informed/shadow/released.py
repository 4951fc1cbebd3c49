"""Released models that somebody else trained, read with checks."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lit_recon.errors import CorruptFileError, MissingDataError, ShapeError, UnsupportedModelError


def load_released(path: Path, network: nn.Module, n: int, n_snapshots: int = 1) -> Tensor:
    """Weights of `n` released models of one architecture.

    Args:
        path: a safetensors file with the tensors of the network's `state_dict`, each with a leading axis of `n`, which
            may be left out for one model. Where each training released several models, `(n, n_snapshots)` lead.
        network: the architecture.
        n: number of models, one per target.
        n_snapshots: models that each training released, the final one included.

    Returns:
        Flat weights `(n, p)` in the order of the network's parameters, in their own precision; `(n, n_snapshots * p)`
        where there are several.

    Raises:
        MissingDataError: there is no such file.
        CorruptFileError: it is no safetensors file.
        UnsupportedModelError: its models have another architecture.
        ShapeError: the number of models is another, or a weight is NaN or infinite.
    """
    if not path.is_file():
        raise MissingDataError(f"{path}: expected a safetensors file of released models; there is none")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFileError(f"{path} is truncated or not a safetensors file ({error}): copy it again") from error
    wanted = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    if tensors.keys() != wanted.keys():
        raise UnsupportedModelError(
            f"{path} must hold the tensors {sorted(wanted)} of a {type(network).__name__}; got {sorted(tensors)}: "
            "set network to the architecture of the released models"
        )
    parts = []
    for name, shape in wanted.items():
        tensor = tensors[name]
        leading = () if n_snapshots == 1 else (n_snapshots,)
        if n == 1 and tuple(tensor.shape) == leading + shape:
            tensor = tensor[None]
        if tuple(tensor.shape[1:]) != leading + shape:
            raise UnsupportedModelError(
                f"{path}: {name} must be (n, {', '.join(map(str, leading + shape))}) for this architecture"
                f"{' and descent.snapshots' if leading else ''}; "
                f"got {tuple(tensor.shape)}: set network to the architecture of the released models"
            )
        if len(tensor) != n:
            raise ShapeError(f"{path} must hold one model per target, {n}; {name} has {len(tensor)}: set split.targets")
        if not torch.isfinite(tensor).all():
            raise ShapeError(f"{path}: {name} holds NaN or infinite weights; such a model cannot be attacked")
        parts.append(tensor.reshape(n, n_snapshots, -1))
    return torch.cat(parts, dim=2).flatten(1)
