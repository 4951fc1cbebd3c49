"""Faults of what surrounds a process: clocks, memory and W&B. Installed in processes that the harness starts only."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

#: Seconds that a disturbed clock goes back, or forth, whenever it is read.
_JUMP = 400.0


def clock_backwards(number: int) -> None:
    """The time of day goes back whenever it is read, as when a clock is set right."""
    import lit_recon.reporting.provenance as provenance

    present, reads = time.time, itertools.count()
    time.time = lambda: present() - _JUMP * next(reads)
    now = provenance.datetime.now
    provenance.datetime = SimpleNamespace(now=lambda zone: now(zone).replace(year=1971))


def clock_forth(number: int) -> None:
    """The clock that measures intervals jumps forth whenever it is read, so that state is saved as often as it can."""
    present, reads = time.monotonic, itertools.count()
    time.monotonic = lambda: present() + _JUMP * next(reads)


def out_of_memory(number: int) -> None:
    """From the given matrix product on, none finds memory: as on a GPU whose memory another process has taken."""
    import torch

    counted = itertools.count(1)

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(counted) >= number > 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return function(*args, **kwargs)

        return call

    for place, name in ((torch.nn.functional, "linear"), (torch, "einsum"), (torch, "bmm"), (torch, "baddbmm")):
        setattr(place, name, failing(getattr(place, name)))


def dying_wandb(number: int) -> None:
    """W&B starts well, and is gone from the given call on."""
    import wandb

    counted = itertools.count(1)

    class Run:
        """Every method is one call to the service."""

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if next(counted) >= number > 0:
                    raise BrokenPipeError(32, "Broken pipe")

            return call

    wandb.init = lambda **_: Run()


#: By the name that the table has.
SURROUNDINGS: dict[str, Callable[[int], None]] = {
    "clock going backwards": clock_backwards,
    "state saved at every step": clock_forth,
    "out of memory": out_of_memory,
    "W&B dies": dying_wandb,
}
