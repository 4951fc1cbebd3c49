"""Safetensors files with a versioned JSON header, written atomically."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.io.files import write_bytes


@contextmanager
def _opened(path: Path, kind: str, remedy: str) -> Iterator[Any]:
    if not path.is_file():
        raise MissingDataError(f"there is no {kind} at {path}: {remedy}")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFileError(f"{path} is truncated or not a safetensors file ({error}): {remedy}") from error


def read_tensors(path: Path, kind: str = "weights", remedy: str = "give another file") -> dict[str, Tensor]:
    """The tensors of any safetensors file by name, on the CPU; `kind` and `remedy` are for messages.

    A MissingDataError says that there is no such file, a CorruptFileError that it is damaged or no safetensors file.
    """
    with _opened(path, kind, remedy) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 a file handle, not a dict


def read_state(path: Path, kind: str, remedy: str) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a state dict saved by torch, perhaps under the key `state_dict`.

    Only tensors and plain containers are unpickled. Arguments and errors as for `read_tensors`.
    """
    if path.suffix == ".safetensors":
        return read_tensors(path, kind, remedy)
    if not path.is_file():
        raise MissingDataError(f"there is no {kind} at {path}: {remedy}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise errors of many kinds
        raise CorruptFileError(
            f"{path} is truncated, or holds more than tensors ({type(error).__name__}): {remedy}"
        ) from error
    content = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CorruptFileError(f"{path} must hold a dict of tensors by name; got {type(content).__name__}: {remedy}")
    return dict(content)


@dataclass(frozen=True)
class TensorFormat:
    """Safetensors files of one kind: tensors, and a JSON object in the text entry `key`.

    The object states the `version` of the format, the only one accepted; without one it is 1. `kind` says what a file
    holds and `remedy` how to make one, for messages.
    """

    key: str
    kind: str
    remedy: str
    version: int = 1

    def write(self, path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """Write a file atomically; a missing folder is created."""
        state = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        write_bytes(path, save(state, {self.key: json.dumps({"version": self.version, **header})}))

    def read(self, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Header and tensors, on the CPU; a CorruptFileError also for another kind or version, or no header."""
        return self.read_header(path), read_tensors(path, self.kind, self.remedy)

    def read_header(self, path: Path) -> dict[str, Any]:
        """The header alone; raises the same errors as `read`."""
        with _opened(path, self.kind, self.remedy) as file:
            metadata = file.metadata() or {}
            header = json.loads(metadata[self.key]) if self.key in metadata else None
        if self.key not in metadata:
            raise CorruptFileError(
                f"{path} is a safetensors file but not a {self.kind} written by this package: {self.remedy}"
            )
        if not isinstance(header, dict) or header.get("version", 1) != self.version:
            raise CorruptFileError(
                f"{path} was written by a release with another format than {self.version}: {self.remedy}"
            )
        return header

    def read_rows(self, path: Path, name: str, n: int) -> Tensor:
        """The first `n` rows of one tensor; raises the same errors as `read`."""
        with _opened(path, self.kind, self.remedy) as file:
            rows: Tensor = file.get_slice(name)[:n]
        return rows
