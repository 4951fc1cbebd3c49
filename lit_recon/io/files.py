"""Atomic writing of files."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

_SUFFIX = ".unfinished"


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step, by renaming a temporary file; a missing folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, content: str) -> None:
    """`write_bytes` of text in UTF-8, with the line ends that `content` has."""
    write_bytes(path, content.encode("utf-8"))


def is_leftover(path: Path) -> bool:
    """Whether `path` is a temporary file that a killed process left behind."""
    return path.name.startswith(".") and path.name.endswith(_SUFFIX)
