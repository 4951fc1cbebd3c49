"""Progress of long computations, shown by a bar on a terminal or a line every half minute in a log; interruption."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

import lit_recon._torchvision

from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from tqdm import tqdm

from lit_recon.reporting.wording import duration

#: Seconds between two lines where there is no terminal, and between two looks at a terminal's bar.
_LINE_SECONDS, _BAR_SECONDS = 30.0, 0.5

#: Tensors are read only when they are shown, because reading one waits for the device.
Shown = float | Tensor


class Progress:
    """Progress of a computation of `total` units, on standard error; `quiet` for all processes but the first."""

    def __init__(self, total: int, label: str, unit: str, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.total, self.label, self.unit, self.quiet = total, label, unit, quiet
        self.stream = stream or sys.stderr
        self.done = self._skipped = 0
        self._started = self._shown_at = time.monotonic()
        self._bar: Any = None
        if self.stream.isatty() and not quiet:
            self._bar = tqdm(total=total, desc=label, unit=f" {unit}", file=self.stream, dynamic_ncols=True)

    def skip(self, n: int) -> None:
        """Count `n` units of an earlier process, which do not enter the speed."""
        self.done, self._skipped = self.done + n, self._skipped + n
        if self._bar is not None:
            self._bar.initial += n
            self._bar.update(n)

    def advance(self, n: int, **metrics: Shown) -> None:
        """Count `n` units that were just done, and show metrics such as the loss beside them."""
        self.done += n
        if self.quiet:
            return
        due = time.monotonic() - self._shown_at >= (_LINE_SECONDS if self._bar is None else _BAR_SECONDS)
        if due:
            self._shown_at = time.monotonic()
        if self._bar is not None:
            if due:
                self._bar.set_postfix({name: f"{float(value):.4g}" for name, value in metrics.items()}, refresh=False)
            self._bar.update(n)
        elif due:
            print(self._line(metrics), file=self.stream, flush=True)

    def write(self, text: str) -> None:
        if not self.quiet:
            tqdm.write(text, file=self.stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _line(self, metrics: dict[str, Shown]) -> str:
        seconds = (time.monotonic() - self._started) / max(1, self.done - self._skipped)
        shown = "".join(f", {name} {float(value):.4g}" for name, value in metrics.items())
        if self.done > self.total:  # further starts, and attacks that others make way to, are not planned
            return f"{self.label}: {self.done} {self.unit}, {self.total} planned{shown}, {duration(seconds)} each"
        left = duration(seconds * (self.total - self.done))
        return f"{self.label}: {self.done}/{self.total} {self.unit}{shown}, {duration(seconds)} each, {left} left"


def announced(total: int, label: str, unit: str) -> Callable[[int], None]:
    """Show the progress of one computation; returns a function to be called with the number of units just done."""
    progress = Progress(total, label, unit)

    def advance(n: int) -> None:
        progress.advance(n)
        if progress.done >= total:
            progress.close()

    return advance


class TrainingProgress(Callback):
    """Shows the progress of training, batch by batch; Lightning counts a step for each of the `optimizers`."""

    def __init__(self, optimizers: int = 1) -> None:
        self.optimizers = optimizers
        self._progress = Progress(0, "training", "batches", quiet=True)  # until training starts

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = int(trainer.num_training_batches) * (trainer.max_epochs or 1)
        self._progress = Progress(total, "training", "batches", quiet=not trainer.is_global_zero)
        self._progress.skip(trainer.global_step // self.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._progress.advance(1, loss=outputs["loss"])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress.write("measuring accuracy on the test images")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress.close()


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_Handler = Callable[[int, FrameType | None], None]


class Interrupted(BaseException):
    """A signal asked the program to stop; `number` is the signal's.

    On a KeyboardInterrupt Lightning would end the process; this exception passes through it to the command.
    """

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
    """Gives a function that returns the signal that has arrived, if any; to be asked between two steps.

    State is thus never saved in the middle of a step. A second signal raises `Interrupted` at once.
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
