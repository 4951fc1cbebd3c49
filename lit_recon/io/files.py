"""Atomic writing and hashes of files, folders that one process at a time works in, and strict reading of JSON."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

_SUFFIX = ".unfinished"
#: In a folder that a process has taken; the system frees it when the process ends, however that happens.
LOCK = ".lock"
#: Locks of this process by folder; those of a scope end with it.
_scopes: list[dict[Path, FileLock]] = []


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step, by renaming a temporary file; a missing folder is created.

    An OSError, such as of a full disk, names `path`, and leaves the old content there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # that of a write or an fsync has no file name
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, content: str) -> None:
    """`write_bytes` of text in UTF-8, with the line ends that `content` has; lone surrogates become escapes."""
    write_bytes(path, content.encode("utf-8", "backslashreplace"))


def parse_json(text: str) -> Any:
    """The content of JSON text; a ValueError for deep nesting, too, and for a repeated key: Python keeps the last."""
    try:
        return json.loads(text, object_pairs_hook=_without_repetition)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there several times")
    return found


def is_leftover(path: Path) -> bool:
    """Whether `path` is a temporary file that a killed process left behind."""
    return path.name.startswith(".") and path.name.endswith(_SUFFIX)


@contextmanager
def holding() -> Iterator[None]:
    """A scope, such as one command; at its end the folders that `hold` took within are free again."""
    _scopes.append({})
    try:
        yield
    finally:
        for lock in _scopes.pop().values():
            lock.release()


def hold(folder: Path) -> bool:
    """Take a folder for this process; False if another process holds it. Without a scope nothing is taken."""
    folder = folder.resolve()
    if not _scopes or any(folder in scope for scope in _scopes):
        return True
    lock = FileLock(folder / LOCK)
    with suppress(NotImplementedError):  # a file system without locks
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
    _scopes[-1][folder] = lock
    return True


def file_hash(path: Path) -> str:
    """SHA-256 of what a file holds, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_contents(settings: Any) -> Any:
    """Nested settings in which every path of a file is a list of the path and a hash of what the file holds now."""
    if isinstance(settings, Mapping):
        return {key: with_contents(value) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [with_contents(value) for value in settings]
    if isinstance(settings, str):
        with suppress(OSError, RuntimeError):  # no name of a file, or of one that cannot be read; no such home folder
            path = Path(settings).expanduser()
            if path.is_file():
                at = path.stat()
                facts = (at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
                return [settings, _hash_once(path.absolute(), facts)]
    return settings


@cache
def _hash_once(path: Path, facts: tuple[int, ...]) -> str:
    """`file_hash`, once for a file as long as these facts about it are the same."""
    return file_hash(path)
