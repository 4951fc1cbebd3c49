"""How long a run has taken, together with its processes that were interrupted."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from pathlib import Path
from typing import Self

from lit_recon.io.files import write_text
from lit_recon.reporting.run_folder import RunFolder

#: Seconds between two notes of the time, at most so many of which a killed process loses.
_EVERY = 10.0


class Stopwatch:
    """Seconds of a run so far, by the clock; noted in its folder, so that a resumed run goes on counting.

    Args:
        folder: of the run, open.
        notes: whether this process notes them; one of a group does.
    """

    def __init__(self, folder: RunFolder, notes: bool = True) -> None:
        self._path, self._notes = folder.clock, notes
        self._before, self._started = _noted(folder.clock), time.monotonic()
        self._stopped = threading.Event()

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._started

    def __enter__(self) -> Self:
        if self._notes:
            threading.Thread(target=self._keep, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._notes:
            self._note()

    def _keep(self) -> None:
        while not self._stopped.wait(_EVERY):
            self._note()

    def _note(self) -> None:
        with contextlib.suppress(OSError):  # a full disk stops the run, not its clock
            write_text(self._path, f"{self.seconds:.3f}\n")


def _noted(path: Path) -> float:
    """Seconds in the file; 0 without a number in it."""
    try:
        seconds = float(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
