"""Faults at chosen file operations of a process: the harness installs them in processes that it starts, nobody else.

An operation is the opening of a file for writing, an fsync, a rename, a removal, or a new folder, all below the folder
that the process was started in; they are counted from 1.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

Moment = Literal["before", "half", "after"]


@dataclass(frozen=True)
class FileFault:
    """What happens at one file operation.

    Args:
        number: of the operation; 0: none, the operations are only counted.
        moment: before the operation, after it, or halfway: half of the content is in the file then.
        error: number of the OSError that this and, as on a full disk, all later operations raise; 0: the process is
            killed.
    """

    number: int = 0
    moment: Moment = "before"
    error: int = 0


class FileOperations:
    """Counts the operations of this process, and lets the fault happen."""

    def __init__(self, fault: FileFault, place: Path) -> None:
        self.fault, self.place, self.count = fault, place.resolve(), 0
        self._open = builtins.open

    @contextmanager
    def watched(self) -> Iterator[FileOperations]:
        """Put the hooks in the place of the functions that everything in Python calls."""
        patched: list[tuple[Any, str, Any]] = [(builtins, "open", self._opened), (io, "open", self._opened)]
        names = ("fsync", "replace", "rename", "unlink", "remove", "mkdir")
        patched += [(os, name, self._hooked(name, getattr(os, name))) for name in names]
        before = [(module, name, getattr(module, name)) for module, name, _ in patched]
        for module, name, hook in patched:
            setattr(module, name, hook)
        try:
            yield self
        finally:
            for module, name, function in before:
                setattr(module, name, function)

    def _opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wxa+") or not self._is_below(file):
            return self._open(file, mode, *args, **kwargs)
        moment = self._arrives()
        if moment == "before":
            self._happens(file)
        opened = self._open(file, mode, *args, **kwargs)
        if moment == "after":
            with opened:
                self._happens(file)
        return _Half(opened, self._happens) if moment == "half" else opened

    def _hooked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def hook(first: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_below(first):
                return function(first, *args, **kwargs)
            moment = self._arrives(removes=name in ("replace", "rename", "unlink", "remove"))
            if moment == "half" and name in ("fsync", "replace", "rename"):
                os.truncate(first, os.stat(first).st_size // 2)
            named = () if isinstance(first, int) else (first,)
            if moment in ("before", "half"):
                self._happens(*named)
            result = function(first, *args, **kwargs)
            if moment == "after":
                self._happens(*named)
            return result

        return hook

    def _arrives(self, removes: bool = False) -> Moment | None:
        """Count an operation; the moment of its fault, if it has one. A full disk lets files be renamed and removed."""
        self.count += 1
        if removes and self.fault.error == errno.ENOSPC:
            return None
        if self.count == self.fault.number:
            return self.fault.moment
        return "before" if self.fault.error and 0 < self.fault.number < self.count else None

    def _happens(self, *path: Any) -> None:
        if self.fault.error:
            raise OSError(self.fault.error, os.strerror(self.fault.error), *path)
        os.kill(os.getpid(), signal.SIGKILL)

    def _is_below(self, file: Any) -> bool:
        where = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.path.abspath(os.fspath(file))
        return Path(os.fsdecode(where)).is_relative_to(self.place)


class _Half:
    """An open file: of the first content that is written to it, half arrives; then the fault happens."""

    def __init__(self, file: IO[Any], happens: Callable[[], None]) -> None:
        self._file, self._happens = file, happens

    def write(self, content: Any) -> int:
        self._file.write(content[: len(content) // 2])
        self._file.flush()
        self._happens()
        return len(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Half:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


#: Errors of file operations by the name that the table has.
ERRORS = {"disk full": errno.ENOSPC, "read-only": errno.EROFS}
