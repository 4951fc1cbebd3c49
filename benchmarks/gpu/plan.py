"""What one run of the GPU benchmark is to do, handed to the process of each section as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.record import Row


@dataclass(frozen=True)
class Sizes:
    """How large the measurements are.

    Attributes:
        width: of the ResNet-18.
        batches: images per client whose iterations are timed.
        victims: numbers of clients attacked at once.
        rounds: timed repetitions of every variant.
        warm_up: uncounted ones before them.
        steps: iterations after which a reconstruction is compared with the CPU's, for ConvNet and ResNet-18.
    """

    width: int
    batches: tuple[int, ...]
    victims: tuple[int, ...]
    rounds: int
    warm_up: int
    steps: tuple[int, int]


FULL = Sizes(width=64, batches=(1, 8, 32), victims=(1, 4, 16), rounds=20, warm_up=5, steps=(200, 20))
#: For a rehearsal: every line of code runs, no figure means anything.
QUICK = Sizes(width=4, batches=(1,), victims=(1, 2), rounds=2, warm_up=1, steps=(4, 2))


@dataclass(frozen=True)
class Plan:
    """One run of the benchmark.

    Attributes:
        device: PyTorch device, `cuda` or, for a rehearsal, `cpu`.
        quick: tiny sizes.
        out: folder of rows, logs and run folders.
        deadline: `time.time()` at which the section has to be done.
        images: `.npz` file of real images; None: cells on them are left out.
        backbone: checkpoint trained on these images; None: one is trained for one epoch.
        options: `KEY=VALUE` settings of `attack.py run` that override those of every cell.
    """

    device: str
    quick: bool
    out: Path
    deadline: float
    images: Path | None = None
    backbone: Path | None = None
    options: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """Whether there are kernels to be compiled and recorded."""
        return self.device.startswith("cuda")

    @property
    def sizes(self) -> Sizes:
        """How large the measurements are."""
        return QUICK if self.quick else FULL

    @property
    def rows(self) -> Path:
        """Folder of the sections' rows, one JSON object per line."""
        return self.out / "rows"

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.time()

    def until(self, deadline: float) -> Plan:
        """The same plan with another deadline."""
        return replace(self, deadline=deadline)

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def loads(cls, text: str) -> Plan:
        """Inverse of `dumps`."""
        fields = json.loads(text)
        for name in ("out", "images", "backbone"):
            fields[name] = None if fields[name] is None else Path(fields[name])
        return cls(**{**fields, "options": tuple(fields["options"])})


def attempt(plan: Plan, about: Row, seconds: float, measure: Callable[[], Row]) -> Row:
    """The row of one measurement, or why there is none.

    Args:
        plan: whose time is used.
        about: what is measured; begins the row.
        seconds: that it may take; with less left it is skipped.
        measure: the rest of the row. What a device or a compiler cannot do is a RuntimeError, and is recorded.
    """
    if plan.left() < seconds and not plan.quick:
        return {**about, "skipped": f"needs up to {seconds:.0f} s; {max(0.0, plan.left()):.0f} s were left"}
    try:
        return {**about, **measure()}
    except RuntimeError as error:
        return {**about, "failed": reason(error)}


def reason(error: Exception) -> str:
    """Type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
