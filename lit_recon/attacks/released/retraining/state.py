"""Tensors of a search in a file, from which a killed run goes on."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from lit_recon.errors import CorruptFileError
from lit_recon.io.files import write_bytes

State = TypeVar("State")


def write_state(path: Path, state: Any) -> None:
    """Write a dataclass of tensors, atomically."""
    write_bytes(path, save({field.name: getattr(state, field.name).contiguous() for field in fields(state)}))


def read_state(path: Path, kind: type[State]) -> State:
    """Read what `write_state` wrote; CorruptFileError for a damaged file, and where `kind` raises a ValueError."""
    try:
        return kind(**load_file(path))
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise CorruptFileError(
            f"{path} is truncated or not the state of a search ({error}): delete it to start over"
        ) from error
