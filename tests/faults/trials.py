"""The faults: each disturbs one command once, or several times, and judges how it took that."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.faults.commands import Case
from tests.faults.harness import FINISHED, Ended, Running, Trial, Undisturbed, start, start_group
from tests.faults.injection import ERRORS, FileFault, Moment
from tests.faults.results import differences, results

#: Disturbs a command in a new folder, given its undisturbed run and a source of random numbers.
Fault = Callable[[Case, Undisturbed, Path, random.Random], Trial]
#: Processes of one trial that are killed, at most.
KILLS = 5
#: Processes of one group that are killed, one after the other.
LOSSES = 2
#: Codes of processes that were killed, or that SIGTERM stopped.
_STOPPED = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
_MOMENTS: Sequence[Moment] = ("before", "half", "after")


def killed_any_time(case: Case, whole: Undisturbed, place: Path, chance: random.Random) -> Trial:
    """Killed at random moments of its run time."""
    trial, script = Trial(), case.write(place)
    for _ in range(KILLS):
        seconds = chance.uniform(0, whole.seconds)
        trial.note(start(script, place, kill_after=seconds), f"after {seconds:.2f} s")
    trial.complete(case, script, whole, place)
    return trial


def killed_in_files(case: Case, whole: Undisturbed, place: Path, chance: random.Random) -> Trial:
    """Killed before, after or halfway through a file operation: an open, a write, an fsync, a rename, a removal."""
    trial, script, left = Trial(), case.write(place), whole.operations
    for _ in range(KILLS):
        fault = FileFault(chance.randint(1, left), chance.choice(_MOMENTS))
        trial.note(start(script, place, fault), f"{fault.moment} file operation {fault.number}")
        left = max(left // 2, 10)  # a resumed process has less to do
    trial.complete(case, script, whole, place)
    return trial


def killed_while_saving(case: Case, whole: Undisturbed, place: Path, chance: random.Random) -> Trial:
    """Killed at random moments while state is saved after every step, as it is after minutes otherwise."""
    trial, script = Trial(), case.write(place)
    for _ in range(KILLS):
        seconds = chance.uniform(0.3, 1) * whole.seconds
        ended = start(script, place, kill_after=seconds, surroundings={"state saved at every step": 0})
        trial.note(ended, f"after {seconds:.2f} s")
    trial.complete(case, script, whole, place)
    return trial


def refused_by_disk(name: str) -> Fault:
    """From a file operation on, all raise the error of a disk."""

    def disturb(case: Case, whole: Undisturbed, place: Path, chance: random.Random) -> Trial:
        trial, script = Trial(), case.write(place)
        fault = FileFault(chance.randint(1, whole.operations), chance.choice(_MOMENTS), ERRORS[name])
        injected = f"{fault.moment} file operation {fault.number}"
        trial.note(start(script, place, fault), injected, refusal=True)
        trial.complete(case, script, whole, place)
        return trial

    return disturb


def small_disk(case: Case, whole: Undisturbed, place: Path, chance: random.Random) -> Trial:
    """A file system of less than the run needs, in memory; more is added afterwards. Needs the right to mount."""
    trial, needed = Trial(), _kib(case, whole, place)
    kib = chance.randint(needed // 8, needed * 7 // 8)
    with _mounted(place, "-o", f"size={kib}k") as disk:
        inside = disk / "place"
        try:
            script = case.write(inside)
        except OSError:  # not even the settings fit
            return trial
        trial.note(start(script, inside), f"disk of {kib} KiB, {needed} are needed", refusal=True)
        _mount(disk, "mount", "-o", "remount,size=1g")
        trial.complete(case, script, whole, inside)
    return trial


def read_only_mount(case: Case, whole: Undisturbed, place: Path, chance: random.Random) -> Trial:
    """Killed, and its folder read-only afterwards, later writable again. Needs the right to mount."""
    trial = Trial()
    with _mounted(place) as disk:
        inside = disk / "place"
        script = case.write(inside)
        start(script, inside, kill_after=chance.uniform(0.2, 1) * whole.seconds)
        _mount(disk, "mount", "-o", "remount,ro")
        trial.note(start(script, inside), "read-only after a kill", refusal=True)
        _mount(disk, "mount", "-o", "remount,rw")
        trial.complete(case, script, whole, inside)
    return trial


def clock_backwards(case: Case, whole: Undisturbed, place: Path, chance: random.Random) -> Trial:
    """The time of day goes back whenever it is read."""
    trial, script = Trial(), case.write(place)
    trial.injections.append("clock")
    trial.note(start(script, place, surroundings={"clock going backwards": 0}), "clock")
    if not trial.lost:
        trial.different += differences(whole.results, results(place))
    return trial


def two_at_once(case: Case, whole: Undisturbed, place: Path, chance: random.Random) -> Trial:
    """The same command twice at the same time, in the same folder; the second starts at a random moment."""
    trial, script = Trial(), case.write(place)
    first = Running(script, place)
    early = chance.uniform(0, whole.seconds / 2)
    time.sleep(early)
    second = Running(script, place)
    ended = [first.end(), second.end()]
    trial.injections.append(f"a second process after {early:.2f} s")
    for one in ended:
        if not (one.is_refused and "another process works in" in one.err):
            trial.note(one)
    if all(one.is_refused for one in ended):
        trial.lost.append(f"both were refused: {[one.err for one in ended]}")
    trial.complete(case, script, whole, place)
    return trial


def out_of_memory(case: Case, whole: Undisturbed, place: Path, chance: random.Random) -> Trial:
    """From a random matrix product on there is no memory, later there is."""
    trial, script = Trial(), case.write(place)
    number = int(10 ** chance.uniform(0, 3.5))
    ended = start(script, place, surroundings={"out of memory": number})
    if not trial.note(ended, f"matrix product {number}", refusal=True) and "out of memory" in ended.out:
        trial.injections.append(f"matrix product {number}: a cell failed")
    trial.complete(case, script, whole, place)
    return trial


def wandb_dies(case: Case, whole: Undisturbed, place: Path, chance: random.Random) -> Trial:
    """W&B starts well, and its service is gone after some calls."""
    trial, script = Trial(), case.write(place)
    number = chance.randint(1, 6)
    ended = start([*script, "--wandb.mode", "offline"], place, surroundings={"W&B dies": number})
    trial.note(ended)
    if "W&B failed" in ended.err:
        trial.injections.append(f"call {number}")
    found = results(place)
    for each in (found, without := dict(whole.results)):
        for name in [name for name in each if name.endswith("config.yaml")]:  # says how W&B is used
            del each[name]
    if not trial.lost:
        trial.different += differences(without, found)
    return trial


def process_lost(size: int) -> Fault:
    """One of a group of processes is killed at a random moment, the others are stopped, and all start again."""

    def disturb(case: Case, whole: Undisturbed, place: Path, chance: random.Random) -> Trial:
        trial, apart = Trial(), place.with_name(f"{place.name}_whole")
        alone = start_group(case.write(apart), apart, size)
        script = case.write(place)
        for _ in range(LOSSES):
            lost, seconds = chance.randrange(size), chance.uniform(0.2, 1) * alone[0].seconds
            ended = start_group(script, place, size, lost, seconds, {"state saved at every step": 0})
            if ended[lost].code == -signal.SIGKILL:
                trial.injections.append(f"process {lost} of {size} after {seconds:.2f} s")
            for one in ended:
                if "Traceback" in one.err or not (one.is_refused or one.code in _STOPPED):
                    trial.note(one, f"process {lost} lost")
        last = start_group(script, place, size)
        finished = any(FINISHED in one.err for one in last)  # one refuses that, the others may be stopped before
        for one in (*alone, *last):
            if not (finished and one.code in _STOPPED):
                trial.note(one)
        trial.write_page(case, place)
        if not trial.lost:
            trial.different += differences(results(apart), results(place))
        shutil.rmtree(apart)
        return trial

    return disturb


def another_interpreter(case: Case, whole: Undisturbed, place: Path, chance: random.Random) -> Trial:
    """Nothing; but the process is not forked from one that has everything imported, and hashes texts in its own way."""
    trial, script = Trial(), case.write(place)
    done = subprocess.run([sys.executable, *script], cwd=place, capture_output=True, text=True)
    trial.note(Ended(done.returncode, done.stdout, done.stderr, 0.0, None))
    trial.different += differences(whole.results, results(place))
    return trial


def can_mount() -> bool:
    """Whether this process may mount file systems."""
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    return done.returncode == 0


@contextmanager
def _mounted(place: Path, *options: str) -> Iterator[Path]:
    """A file system in memory beside a place."""
    disk = place.with_name(f"{place.name}_disk")
    disk.mkdir(parents=True)
    _mount(disk, "mount", "-t", "tmpfs", *options, "tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _mount(disk: Path, *command: str) -> None:
    subprocess.run([*command, str(disk)], check=True, capture_output=True)


def _kib(case: Case, whole: Undisturbed, place: Path) -> int:
    """What the files of an undisturbed run take, in pages of 4 KiB each."""
    start(case.write(place), place)
    return sum(-(-path.stat().st_size // 4096) * 4 + 4 for path in place.rglob("*"))
