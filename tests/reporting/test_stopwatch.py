"""The time of a run, over the processes that it took."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.stopwatch import Stopwatch


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.open(tmp_path / "run", "seed: 0")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("lit_recon.reporting.stopwatch.time.monotonic", lambda: now[0])
    return now


def test_a_resumed_run_goes_on_counting(folder: RunFolder, clock: list[float]) -> None:
    with Stopwatch(folder):
        clock[0] += 40
    clock[0] += 500  # nobody works
    with Stopwatch(folder) as watch:
        clock[0] += 2
        assert watch.seconds == pytest.approx(42)


def test_a_killed_process_has_noted_its_time(
    folder: RunFolder, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = Stopwatch(folder)
    waits = iter([False, False, True])
    monkeypatch.setattr(killed._stopped, "wait", lambda seconds: next(waits))
    monkeypatch.setattr(killed, "_note", lambda note=killed._note: (clock.__setitem__(0, clock[0] + 10), note()))
    killed._keep()
    assert Stopwatch(folder).seconds == pytest.approx(20)


def test_one_process_of_a_group_notes_it(folder: RunFolder, clock: list[float]) -> None:
    with Stopwatch(folder, notes=False):
        clock[0] += 40
    assert not folder.clock.exists()


@pytest.mark.parametrize("text", ["", "nan", "-3", "soon"])
def test_a_broken_note_counts_nothing(folder: RunFolder, clock: list[float], text: str) -> None:
    folder.clock.write_text(text)
    assert Stopwatch(folder).seconds == 0


def test_a_run_that_starts_over_counts_from_zero(folder: RunFolder, clock: list[float]) -> None:
    with Stopwatch(folder):
        clock[0] += 40
    again = RunFolder.open(folder.path, "seed: 0", overwrite=True)
    assert Stopwatch(again).seconds == 0
