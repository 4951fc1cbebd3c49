"""Disturb every command in every way, and record how it took that.

    python -m tests.faults --kills 200

Repeated after an interruption, it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path

from benchmarks.record import Record, Row
from tests.faults import trials
from tests.faults.commands import CASES, ROOT, Case
from tests.faults.harness import Trial, Undisturbed, start, undisturbed

KILLS = {
    "killed at a random moment": trials.killed_any_time,
    "killed in a file operation": trials.killed_in_files,
    "killed while saving after every step": trials.killed_while_saving,
}
OTHERS = {
    "another interpreter": trials.another_interpreter,
    "disk full": trials.refused_by_disk("disk full"),
    "small disk": trials.small_disk,
    "read-only": trials.refused_by_disk("read-only"),
    "read-only mount": trials.read_only_mount,
    "clock going backwards": trials.clock_backwards,
    "two processes at once": trials.two_at_once,
    "out of memory": trials.out_of_memory,
    "W&B dies": trials.wandb_dies,
    "a process of two lost": trials.process_lost(2),
    "a process of three lost": trials.process_lost(3),
}
#: Commands that several processes share; the others refuse them.
_SHARED = ("backbone", "shadows, exact", "attack run", "reconn run", "membership")
#: Faults that cannot apply. An audit has a time limit, which a clock that jumps ahead cuts short. Audits, shadow models
#: and reports have no W&B, and a zoo none of its own. A report computes nothing that could be saved or lack memory, and
#: linear models need no products of PyTorch's matrices.
LEFT_OUT = {
    *(("killed while saving after every step", name) for name in ("audit", "report")),
    *(("W&B dies", name) for name in ("audit", "shadows, exact", "shadows, linear", "zoo", "report")),
    *(("out of memory", name) for name in ("glm", "report")),
    *((f"a process of {size} lost", name) for size in ("two", "three") for name in CASES if name not in _SHARED),
}


class Campaign:
    """Trials by fault, command and number, in a folder of their own."""

    def __init__(self, record: Record, seed: int, place: Path) -> None:
        self.record, self.seed, self.place = record, seed, place
        start([str(ROOT / "attack.py"), "--help"], place)  # the process to fork from imports everything once
        self.whole = cache(self._whole)

    def _whole(self, name: str) -> Undisturbed:
        return undisturbed(CASES[name], self.place / name / "whole")

    def run(self, fault: str, name: str, number: int) -> None:
        """One trial, unless the record has it."""
        key = {"fault": fault, "command": name, "trial": number}
        self.record.measure(key, lambda: self._row(fault, CASES[name], number))

    def _row(self, fault: str, case: Case, number: int) -> Row:
        chance = random.Random(f"{self.seed} {fault} {case.name} {number}")
        place, began = self.place / case.name / f"{fault} {number}", time.perf_counter()
        trial: Trial = {**KILLS, **OTHERS}[fault](case, self.whole(case.name), place, chance)
        seconds = round(time.perf_counter() - began, 1)
        if not trial.lost and not trial.different:
            shutil.rmtree(place, ignore_errors=True)
        return {**vars(trial), "seconds": seconds}

    @property
    def kills(self) -> int:
        """Processes that were killed so far."""
        return sum(len(row["injections"]) for row in self.record.rows if row["fault"] in KILLS)


def main() -> int:
    """Run what is missing; the exit code is 1 if a command lost something or was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="processes to kill, over all commands, at least")
    parser.add_argument("--trials", type=int, default=2, help="of every other fault, for each command")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="faults-"))
    names = [name for name in OTHERS if trials.can_mount() or name not in ("small disk", "read-only mount")]
    with Record("faults", vars(arguments)) as record:
        campaign, number = Campaign(record, arguments.seed, place), 0
        while campaign.kills < arguments.kills:
            for fault in KILLS:
                for name in CASES:
                    if (fault, name) not in LEFT_OUT:
                        campaign.run(fault, name, number)
            number += 1
        for fault in names:
            for name in CASES:
                for number in range(1 if fault == "another interpreter" else arguments.trials):
                    if (fault, name) not in LEFT_OUT:
                        campaign.run(fault, name, number)
    bad = [row for row in record.rows if row["lost"] or row["different"]]
    print(f"{campaign.kills} kills, {len(record.rows)} trials, {len(bad)} of them bad; folders of these are in {place}")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
