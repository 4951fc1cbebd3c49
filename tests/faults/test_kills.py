"""The harness on the quickest commands; `python -m tests.faults` has all of them, and far more kills."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from lit_recon.io import files
from tests.faults import trials
from tests.faults.commands import CASES, ROOT
from tests.faults.harness import Undisturbed, start, undisturbed
from tests.faults.injection import FileFault, FileOperations
from tests.faults.results import differences, results

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Undisturbed]:
    """The undisturbed run of a command."""
    start([str(ROOT / "attack.py"), "--help"], ROOT)  # the process to fork from imports everything once
    return cache(lambda name: undisturbed(CASES[name], tmp_path_factory.mktemp("whole") / "place"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name", "seed"),
    [
        (trials.killed_any_time, "shadows, exact", 1),
        (trials.killed_in_files, "attack run", 3),
        (trials.refused_by_disk("disk full"), "audit", 4),
        (trials.two_at_once, "audit", 6),
        (trials.clock_backwards, "audit", 7),
        (trials.wandb_dies, "attack run", 8),
        (trials.out_of_memory, "shadows, exact", 9),
    ],
)
def test_nothing_is_lost_and_no_figure_changes(
    fault: trials.Fault,
    name: str,
    seed: int,
    whole: Callable[[str], Undisturbed],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "KILLS", 3)
    trial = fault(CASES[name], whole(name), tmp_path / "place", random.Random(seed))
    assert trial.injections
    assert (trial.lost, trial.different) == ([], [])


class KilledError(BaseException):
    """Stands for a kill, in the process of the test."""


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def happens(operations: FileOperations, *path: object) -> None:
        raise KilledError

    monkeypatch.setattr(FileOperations, "_happens", happens)
    return


def torn(path: Path, content: bytes) -> None:
    """A way to write that a kill can tear."""
    with path.open("wb") as file:
        file.write(content)


@pytest.mark.usefixtures("killing")
@pytest.mark.filterwarnings("ignore:.*unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")  # as by a kill
def test_the_hooks_tear_a_write_that_is_not_atomic_and_no_other(tmp_path: Path) -> None:
    path, seen = tmp_path / "file", set()
    for number in range(1, 5):
        for moment in ("before", "half", "after"):
            for write in (files.write_bytes, torn):
                path.write_bytes(b"old")
                with FileOperations(FileFault(number, moment), tmp_path).watched() as operations:
                    try:
                        write(path, b"newer!")
                    except KilledError:
                        if write is torn:
                            seen.add(path.read_bytes())
                        else:
                            assert path.read_bytes() in (b"old", b"newer!")
                assert operations.count >= min(number, 1)
    assert seen == {b"old", b"new", b""}


def test_a_disk_that_is_full_stays_full(tmp_path: Path) -> None:
    with FileOperations(FileFault(2, "before", 28), tmp_path).watched():
        torn(tmp_path / "first", b"1")
        for name in ("second", "third"):
            with pytest.raises(OSError, match="No space") as caught:
                torn(tmp_path / name, b"2")
            assert caught.value.filename == tmp_path / name
        (tmp_path / "first").unlink()
    torn(tmp_path / "fourth", b"4")


def test_results_differ_by_the_last_digit_and_not_by_times(tmp_path: Path) -> None:
    texts = {
        "same": '{"rmse": 0.1, "seconds": 1, "attack_seconds": 2, "created": "now"}',
        "later": '{"rmse": 0.1, "seconds": 3, "attack_seconds": 4, "created": "then"}',
        "other": '{"rmse": 0.10000000000000002, "seconds": 1}',
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.json").write_text(text)
    (tmp_path / "later" / "more.csv").write_text("id,mse\n1,0.5\n")
    found = {name: results(tmp_path / name) for name in texts}
    assert differences(found["same"], found["later"]) == ["more.csv is too many"]
    assert differences(found["same"], found["other"]) == ["metrics.json differs in rmse: 0.1 and 0.10000000000000002"]
