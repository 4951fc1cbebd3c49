"""Tensors of a search in a file, from which a killed run goes on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from lit_recon.errors import CorruptFileError
from lit_recon.io.files import write_bytes


@dataclass(frozen=True, eq=False)
class StoredSearch:
    """Subclasses add fields, tensors with one row per target."""

    images: Tensor  # `(m, ..., c, h, w)`

    def write(self, path: Path) -> None:
        """Write a file, atomically."""
        write_bytes(path, save({field.name: getattr(self, field.name).contiguous() for field in fields(self)}))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of `write`; CorruptFileError if it is damaged."""
        try:
            found = cls(**load_file(path))
            if len({len(getattr(found, field.name)) for field in fields(found)}) != 1 or found.images.dim() < 4:
                raise ValueError("images must be (m, ..., c, h, w) and all else (m, ...)")
            return found
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise CorruptFileError(
                f"{path} is truncated or not the state of a search ({error}): delete it to start over"
            ) from error
