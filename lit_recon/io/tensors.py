"""Safetensors files with a versioned JSON header, written atomically."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.io.files import parse_json, write_bytes


@contextmanager
def _opened(path: Path, kind: str, remedy: str) -> Iterator[Any]:
    if not path.is_file():
        raise MissingDataError(f"there is no {kind} at {path}: {remedy}")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # damaged headers raise errors of many kinds
        raise CorruptFileError(f"{path} is truncated or not a safetensors file ({error}): {remedy}") from error


def read_tensors(path: Path, kind: str = "weights", remedy: str = "give another file") -> dict[str, Tensor]:
    """The tensors of any safetensors file by name, on the CPU; `kind` and `remedy` are for messages.

    A MissingDataError says that there is no such file, a CorruptFileError that it is damaged or no safetensors file.
    """
    with _opened(path, kind, remedy) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 a file handle, not a dict


def read_state(path: Path, kind: str, remedy: str) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a state dict saved by torch.

    The state dict may be under the key `state_dict`, or under another one if no other holds such a dict. Only tensors
    and plain containers are unpickled. Arguments and errors as for `read_tensors`.
    """
    if path.suffix == ".safetensors":
        return read_tensors(path, kind, remedy)
    if not path.is_file():
        raise MissingDataError(f"there is no {kind} at {path}: {remedy}")
    try:
        content = load_saved(path)
    except Exception as error:  # damaged bytes raise errors of many kinds
        raise CorruptFileError(
            f"{path} is truncated, damaged, neither a .safetensors file nor one of torch.save, or holds more than "
            f"tensors ({type(error).__name__}): {remedy}"
        ) from error
    if isinstance(content, Mapping) and not _is_state(content):
        states = [key for key, value in content.items() if _is_state(value) and value]
        key = "state_dict" if "state_dict" in content else states[0] if len(states) == 1 else None
        if len(states) > 1 and key is None:
            raise CorruptFileError(
                f"{path} must hold one dict of tensors by name; got several, under {', '.join(map(str, states))}: "
                f"{remedy}"
            )
        content = content[key] if key is not None else content
    if not _is_state(content):
        raise CorruptFileError(
            f"{path} must hold a dict of tensors by name, at most under one key; got {type(content).__name__}: {remedy}"
        )
    odd = [name for name, value in content.items() if not _is_plain(value)]
    if odd:
        raise CorruptFileError(f"{path}: {odd[0]} is sparse, quantized, or larger than its content: {remedy}")
    return dict(content)


def _is_state(content: object) -> bool:
    """Whether these are tensors by name."""
    return isinstance(content, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    )


def _is_plain(value: Tensor) -> bool:
    """Whether a tensor is dense and every element is stored."""
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def load_saved(path: Path) -> Any:
    """What `torch.save` wrote, tensors and plain containers only, on the CPU.

    Damaged bytes raise errors of many kinds; PyTorch itself does not compare the checksums of an archive.
    """
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    if is_archive:
        with zipfile.ZipFile(path) as archive:
            check_archive(archive, path.stat().st_size)
    return torch.load(path, map_location="cpu", weights_only=True)


#: The mark of a folder among the attributes of an entry.
_FOLDER = 0x10


def check_archive(archive: zipfile.ZipFile, size: int) -> None:
    """A BadZipFile for entries of one name, with wrong checksums, packed, or marked as folders: PyTorch has none."""
    names = archive.namelist()
    if len(set(names)) < len(names):
        raise zipfile.BadZipFile("entries of one name")
    if any(entry.external_attr & _FOLDER for entry in archive.infolist()):
        raise zipfile.BadZipFile("entries marked as folders")  # PyTorch would return memory that nobody has set
    if sum(entry.file_size for entry in archive.infolist()) > size:
        raise zipfile.BadZipFile("entries that are larger than the file")
    if (damaged := archive.testzip()) is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} differs")


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
            header = parse_json(metadata[self.key]) if self.key in metadata else None
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


class NoLarger(TorchDispatchMode):
    """Within it, a network can be built that is not much larger than the tensors of its file; a ValueError otherwise.

    Args:
        arguments: of the network, as the file states them; seeds may be of any size.
        tensors: of the file.
    """

    def __init__(self, arguments: object, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        n = sum(tensor.numel() for tensor in tensors)
        # no layer has more units, and no network more layers, than there are weights
        most = max(_ANY_SIZE, n)
        for number in _numbers(arguments):
            if not abs(number) <= most:
                raise ValueError(f"the size {number:g} is too large for {n} weights")
        self._most = max(_ANY_SIZE**2, 4 * n)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.numel() > self._most:  # allocated, but not yet filled
            raise ValueError(f"a layer of {made.numel()} weights is larger than the whole file")
        return made


#: Sizes that need no weights, such as the side of an image.
_ANY_SIZE = 4096


def _numbers(content: object) -> Iterator[float]:
    if isinstance(content, int | float):
        yield content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _numbers(value) if key != "seed" else ()
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _numbers(value)
