"""Starts a command under faults, again and again until it ends, and compares its results with an undisturbed run's."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.commands import OUT, ROOT, Case
from tests.faults.injection import FileFault
from tests.faults.results import differences, results
from tests.processes import Script, ranks

CHILD = Path(__file__).with_name("child.py")
#: Seconds after which a command that has not ended counts as hanging.
LIMIT = 240.0
#: Seconds that the others of a group have to end after SIGTERM, when one was lost.
_GRACE = 10.0
#: Of what a command says that is started once more after its last file was written.
FINISHED = "holds a finished run"


@dataclass(frozen=True)
class Ended:
    """A process that has ended; `operations` on files were counted unless it was killed."""

    code: int
    out: str
    err: str
    seconds: float
    operations: int | None

    @property
    def is_refused(self) -> bool:
        """Whether it ended with one line that says what is wrong."""
        last = (self.err.splitlines() or [""])[-1]
        return self.code == 2 and "Traceback" not in self.err and last.startswith("error: ")


class Running:
    """A script that runs in a folder, under faults of file operations and of its surroundings."""

    def __init__(
        self,
        script: Sequence[str],
        place: Path,
        fault: FileFault | None = None,
        surroundings: Mapping[str, int] | None = None,
    ) -> None:
        self._note = Path(tempfile.mkdtemp()) / "operations"
        described = {"file": asdict(fault or FileFault()), "surroundings": dict(surroundings or {})}
        self._began = time.perf_counter()
        self._process = Script(CHILD, json.dumps(described), self._note, *script, cwd=place)

    def end(self, kill_after: float | None = None) -> Ended:
        """Wait for the end, or kill the process after some seconds."""
        try:
            out, err = self._process.communicate(LIMIT if kill_after is None else kill_after)
        except subprocess.TimeoutExpired as late:  # it has been killed
            out, err = str(late.stdout), str(late.stderr)
            if kill_after is None:
                raise AssertionError(f"it has not ended after {LIMIT:g} s: {err}") from late
        count = int(self._note.read_text()) if self._note.is_file() else None
        shutil.rmtree(self._note.parent)
        assert self._process.returncode is not None
        return Ended(self._process.returncode, out, err, time.perf_counter() - self._began, count)


def start(
    script: Sequence[str],
    place: Path,
    fault: FileFault | None = None,
    kill_after: float | None = None,
    surroundings: Mapping[str, int] | None = None,
) -> Ended:
    """Run a script to its end."""
    return Running(script, place, fault, surroundings).end(kill_after)


def start_group(
    script: Sequence[str],
    place: Path,
    size: int,
    lost: int | None = None,
    kill_after: float = 0.0,
    surroundings: Mapping[str, int] | None = None,
) -> list[Ended]:
    """Run a script in a group of processes, of which one may be killed after some seconds.

    The others of one that fails are stopped as torchrun stops them: by SIGTERM, and later by SIGKILL.
    """
    with tempfile.TemporaryDirectory() as notes:
        described = {"file": asdict(FileFault()), "surroundings": dict(surroundings or {})}
        began = time.perf_counter()
        group = ranks(CHILD, json.dumps(described), Path(notes) / "operations", *script, cwd=place, size=size)
        if lost is not None:
            group[lost].wait(kill_after)
            group[lost].kill()
        _await(group)
        said = [one.communicate(LIMIT) for one in group]
        codes = [one.returncode for one in group]
    seconds = time.perf_counter() - began
    return [Ended(code or 0, out, err, seconds, None) for code, (out, err) in zip(codes, said, strict=True)]


def _await(group: Sequence[Script]) -> None:
    """Wait until all have ended, or one has failed and the others are stopped."""
    until = time.perf_counter() + LIMIT
    while time.perf_counter() < until and {None} <= (codes := {one.poll() for one in group}) <= {None, 0}:
        time.sleep(0.1)
    if None in codes and codes - {None, 0}:
        for stop in (Script.terminate, Script.kill):
            for one in group:
                stop(one)
            until = time.perf_counter() + _GRACE
            for one in group:
                one.wait(max(0.0, until - time.perf_counter()))


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody disturbed: its results, seconds, and number of file operations."""

    results: dict[str, Any]
    seconds: float
    operations: int


def undisturbed(case: Case, place: Path) -> Undisturbed:
    """Run a command in a new folder."""
    ended = start(case.write(place), place)
    if ended.code or ended.operations is None:
        raise AssertionError(f"{case.name} does not run at all: {ended.err}")
    return Undisturbed(results(place), ended.seconds, ended.operations)


@dataclass
class Trial:
    """A command that was disturbed, perhaps several times, until it ended.

    Attributes:
        injections: faults that happened, in words; one whose moment did not come is none.
        lost: what went wrong where a process did not end as it should: by itself, by a kill, or with one line.
        different: results that differ from those of the undisturbed run.
    """

    injections: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    def note(self, ended: Ended, injected: str = "", refusal: bool = False) -> bool:
        """Judge a process that has ended; whether it was disturbed. With `refusal` one line of error is in order."""
        if ended.code == -signal.SIGKILL and injected:
            self.injections.append(injected)
            return True
        if refusal and ended.is_refused:
            self.injections.append(f"{injected}: {ended.err.splitlines()[-1]}")
            return True
        finished = ended.is_refused and FINISHED in ended.err
        if ended.code and not finished:
            self.lost.append(f"{injected or 'at last'}: ended with {ended.code}: {ended.err[-2000:]}")
        elif "Traceback" in ended.err:
            self.lost.append(f"{injected or 'at last'}: {ended.err[-2000:]}")
        return False

    def complete(self, case: Case, script: Sequence[str], whole: Undisturbed, place: Path) -> None:
        """Start the command a last time, undisturbed, and compare."""
        self.note(start(script, place))
        self.write_page(case, place)
        if not self.lost:
            self.different += differences(whole.results, results(place))

    def write_page(self, case: Case, place: Path) -> None:
        """Of a finished run that was killed between its last figures and its page; what the refusal said does it."""
        if case.has_page and not self.lost and not (place / OUT / "report.html").is_file():
            self.note(start([str(ROOT / "attack.py"), "report", OUT], place))
