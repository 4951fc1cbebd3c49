"""The sections of the GPU benchmark, and the process that runs one of them.

Each section has a process of its own: an error on the device spoils the process that met it, and a compiler that takes
too long can only be stopped from outside. A section is a generator of rows; a new one joins the list.

    python -m benchmarks.gpu.sections NAME PLAN    (started by benchmarks.gpu)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu.agreement import agreement
from benchmarks.gpu.cells import cells
from benchmarks.gpu.device import device_facts, tensor_float
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.throughput import throughput, together
from benchmarks.record import Row


@dataclass(frozen=True)
class Section:
    """Rows on one question.

    Attributes:
        run: makes the rows, the most important ones first, and heeds the plan's deadline.
        share: of the time that all sections have; what one does not use, those after it may.
    """

    run: Callable[[Plan], Iterator[Row]]
    share: float

    @property
    def name(self) -> str:
        """The function's."""
        return self.run.__name__


SECTIONS = [
    Section(agreement, 0.20),
    Section(throughput, 0.35),
    Section(together, 0.15),
    Section(cells, 0.30),
]


def main(arguments: Sequence[str]) -> None:
    """Run a section; every row is written as soon as it is there."""
    name, text = arguments
    plan = Plan.loads(text)
    section = next(section for section in SECTIONS if section.name == name)
    plan.rows.mkdir(parents=True, exist_ok=True)
    with (plan.rows / f"{name}.jsonl").open("w", encoding="utf-8") as file, tensor_float(False):
        rows = (row for part in ([{"hardware": device_facts(plan.device)}], section.run(plan)) for row in part)
        for row in rows:
            line = json.dumps({"section": name, **row}, default=str)
            file.write(f"{line}\n")
            file.flush()
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
