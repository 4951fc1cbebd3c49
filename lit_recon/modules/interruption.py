"""How a run is asked to stop: Ctrl+C, or the SIGTERM of a scheduler, turned into one exception.

Lightning would end the process itself on a KeyboardInterrupt; an exception of our own passes through it, so that the
command can say how to go on.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_Handler = Callable[[int, FrameType | None], None]


class Interrupted(BaseException):
    """Somebody asked the program to stop. `number` is the signal's."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` wherever the program is when a signal arrives."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    with _handling(stop):
        yield


@contextmanager
def deferred_interruption() -> Iterator[Callable[[], int | None]]:
    """Give a question to ask between two steps: which signal has arrived, if any? A second signal does not wait.

    State that a step has half changed is never seen by whoever saves it.
    """
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if arrived:
            raise Interrupted(number)
        arrived.append(number)

    with _handling(note):
        yield lambda: arrived[0] if arrived else None


@contextmanager
def _handling(handler: _Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and signals reach no other
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
