"""Shared parts of the adapters: arrays by name, file names, and the error where a framework is not installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_recon.errors import ConfigError, ShapeError

#: Names for arrays that a framework sends without names: of `model.state_dict()`, or given in the order of the arrays.
Names = nn.Module | Sequence[str] | None


def missing(framework: str, extra: str) -> ConfigError:
    """The error that says how to install a framework."""
    return ConfigError(f'recording needs {framework}, which is not installed: pip install "lit_recon[{extra}]"')


def path_of(folder: Path | str, client: str, number: int | None) -> Path:
    """The file for one client and round; where the round is unknown, the first that has no file yet."""
    if number is None:
        number = 1
        while path_of(folder, client, number).exists():
            number += 1
    return Path(folder) / f"{client}-round{number}.safetensors"


def named(arrays: Mapping[str, Any], names: Names = None) -> dict[str, Tensor]:
    """Copies of arrays or tensors by name; keys 0, 1, ... mean arrays without names, which get `names`."""
    tensors = {name: _copied(name, value) for name, value in arrays.items()}
    if list(tensors) != [str(i) for i in range(len(tensors))]:
        return tensors
    if names is None:
        raise ConfigError(
            f"got {len(tensors)} arrays without names: give names=, the model or the list of names in their order"
        )
    own = list(names.state_dict()) if isinstance(names, nn.Module) else list(names)
    if len(own) != len(tensors):
        raise ShapeError(
            f"expected {len(own)} arrays, one for each name, but got {len(tensors)}: give as names= the names of the "
            "arrays that are sent, in their order"
        )
    found = dict(zip(own, tensors.values(), strict=True))
    if isinstance(names, nn.Module):
        for name, value in names.state_dict().items():
            if found[name].shape != value.shape:
                raise ShapeError(
                    f"{name} of the model has shape {tuple(value.shape)}, but the array in its place has "
                    f"{tuple(found[name].shape)}: give as names= the names of the arrays that are sent, in their order"
                )
    return found


def _copied(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    try:
        return torch.tensor(np.asarray(value))
    except TypeError as error:  # bytes of an encrypted array, objects
        raise ShapeError(
            f"{name} must be an array of numbers; got {type(value).__name__}: record before the arrays are encrypted "
            "or packed"
        ) from error
