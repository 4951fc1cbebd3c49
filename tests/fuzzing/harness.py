"""One fuzzed input given to one reader: is the end of it acceptable?

Acceptable are a valid result, and a LitReconError of one line that names a file of the input and says what to do. All
else is a fault: another exception, code that ran from data, memory far above the size of the files, too much time, a
result that contradicts the input.
"""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from benchmarks.record import status_mib
from lit_recon.errors import LitReconError
from tests.fuzzing.payloads import CANARY

#: Processor time in seconds after which an input counts as a hang.
DEADLINE = 10.0
#: Memory in MiB that any input may take, and how many times the size of its files on top of that.
MEMORY_MIB, MEMORY_TIMES = 96.0, 8.0
#: A message tells its reader to do one of these.
_ADVICE = re.compile(
    r"\b(?:add|allow|ask|call|change|check|choose|convert|copy|delete|export|fetch|finish|give|install|leave|list|lower|"
    r"make|name|pass|put|raise|record|remove|rename|renumber|repeat|replace|restore|resume|run|save|set|start|state|train|"
    r"transpose|use|write)\b|--help"
)


class Link(NamedTuple):
    """A symbolic link."""

    target: str


#: Contents by path relative to the folder of an input; None is an empty folder.
Files = Mapping[str, bytes | Link | None]


@dataclass(frozen=True)
class Reader:
    """A reader of the package and the inputs that it is given.

    Attributes:
        name: of the reader in the table.
        kind: of input.
        inputs: strategy of files; each example starts from a valid input or is random.
        read: reads the folder of an input.
        check: raises AssertionError where a valid result contradicts the files.
        short: examples in the short profile.
        names: what a message must name one of, beside the names of the files and their folder.
        advice: what else, as an expression, says in a message what to do.
    """

    name: str
    kind: str
    inputs: SearchStrategy[Files]
    read: Callable[[Path], Any]
    check: Callable[[Any, Files], None] = lambda result, files: None
    short: int = 60
    names: tuple[str, ...] = ()
    advice: str = ""


class Verdict(NamedTuple):
    """The end of one input: `valid`, `refused`, or a fault, `crash`, `hang` or `wrong`, described in words."""

    kind: str
    told: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind not in ("valid", "refused")


class Hang(BaseException):
    """The time for one input is over; no `except Exception` of a reader stops it."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `Hang` after so much processor time, so that a busy machine changes nothing."""

    def stop(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def write_files(folder: Path, files: Files) -> int:
    """Write an input, and give its size in bytes."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        elif isinstance(content, Link):
            path.symlink_to(content.target)
        else:
            path.write_bytes(content)
    return sum(len(content) for content in files.values() if isinstance(content, bytes))


def examine(reader: Reader, files: Files, folder: Path) -> Verdict:
    """Give the files to the reader in a new `folder`, and judge what comes of it."""
    folder.mkdir(parents=True)
    try:
        size = write_files(folder, files)
        CANARY.unlink(missing_ok=True)
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
        before = status_mib("VmRSS")
        verdict = _read(reader, files, folder)
        taken = status_mib("VmHWM") - before
        if CANARY.exists():
            return Verdict("crash", "code ran from data")
        if taken > MEMORY_MIB + MEMORY_TIMES * size / 2**20:
            return Verdict("crash", f"{taken:.0f} MiB of memory for {size} bytes of files")
        return verdict
    finally:
        shutil.rmtree(folder)


def _read(reader: Reader, files: Files, folder: Path) -> Verdict:
    try:
        with deadline(DEADLINE):
            result = reader.read(folder)
    except LitReconError as error:
        return _judged(str(error), (str(folder), *files, *reader.names), reader.advice)
    except Hang:
        return Verdict("hang", f"more than {DEADLINE:g} s of processor time")
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001  # SystemExit, too: a reader must not end the process
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = "" if place is None else f" at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
        return Verdict("crash", f"{type(error).__name__}: {str(error)[:200]}{where}")
    try:
        reader.check(result, files)
    except Exception as error:  # noqa: BLE001  # a result by which a check fails is as wrong as one that it refuses
        return Verdict("wrong", f"{type(error).__name__}: {str(error)[:300]}")
    return Verdict("valid")


def _judged(message: str, names: tuple[str, ...], advice: str) -> Verdict:
    """Whether a message of an error is good enough."""
    if not message.isprintable():
        return Verdict("crash", f"the message is not one printable line: {message!r}")
    if not any(name in message for name in names):
        return Verdict("crash", f"the message names none of {', '.join(names[:4])}: {message}")
    if not _ADVICE.search(message) and not (advice and re.search(advice, message)):
        return Verdict("crash", f"the message does not say what to do: {message}")
    return Verdict("refused", message)


@dataclass
class Tally:
    """Counts of the ends of inputs, and the first input of every kind of fault."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: dict[str, Files] = field(default_factory=dict)
    messages: Counter[str] = field(default_factory=Counter)

    def add(self, verdict: Verdict, files: Files) -> None:
        self.counts[verdict.kind] += 1
        if verdict.is_fault:
            # messages of one kind differ in numbers and names only
            self.faults.setdefault(f"{verdict.kind}: {re.sub(r'[0-9]+', '0', verdict.told)[:160]}", files)

    @property
    def total(self) -> int:
        return self.counts.total()

    @property
    def n_faults(self) -> int:
        return sum(count for kind, count in self.counts.items() if kind not in ("valid", "refused"))


#: A file system in memory where there is one: a disk takes longer than most readers.
PLACE = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder, in memory where that is possible."""
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        yield Path(folder)


def explore(reader: Reader, n: int, start: int) -> Tally:
    """Give `n` inputs to a reader; a fault is counted, not raised. `start` is the seed of the draws."""
    tally = Tally()
    with scratch() as folder:

        @seed(start)
        @settings(
            max_examples=n, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=[*HealthCheck]
        )
        @given(reader.inputs)
        def run(files: Files) -> None:
            tally.add(examine(reader, files, folder / "input"), files)

        run()
    return tally
