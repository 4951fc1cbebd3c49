"""Pieces of work that processes share: one process at a piece, its output in a log, and no failure ends the others."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from lit_recon.errors import LitReconError


@dataclass(frozen=True)
class Failure:
    """What went wrong with a piece of work: in one line, and with its traceback where nobody has foreseen it."""

    error: Exception
    reason: str
    traceback: str


def alone(lock: Path, wait: bool, work: Callable[[], None]) -> None:
    """Do the work as the only process at it.

    Args:
        lock: file that processes lock for it.
        wait: for another process that is at it, to end or to die; else leave the piece to that one.
        work: has to look once more whether anything is left to do.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        holder = FileLock(lock).acquire(timeout=-1 if wait else 0)
    except Timeout:
        return
    with holder:
        work()


@contextlib.contextmanager
def logged(log: Path) -> Iterator[None]:
    """Append to a log what is printed meanwhile."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("a", encoding="utf-8") as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        yield


def attempted(log: Path, work: Callable[[], None]) -> Failure | None:
    """Do the work with its output appended to a log; what went wrong, whatever it is, or None."""
    try:
        with logged(log):
            work()
    except Exception as error:  # noqa: BLE001  # whatever it is, one piece must not take the others with it
        reason = " ".join(str(error).split()) or type(error).__name__
        return Failure(error, reason, "" if isinstance(error, LitReconError) else traceback.format_exc())
    return None
