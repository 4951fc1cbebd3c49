"""A bar on a terminal, lines in a log, silence elsewhere; and honest speeds after a resumption."""

from __future__ import annotations

import io

import pytest
import torch

from lit_recon.training import progress
from lit_recon.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_log_gets_a_line_every_half_minute(clock: Clock) -> None:
    log = io.StringIO()
    shown = Progress(100, "attack", "iterations", stream=log)
    for _ in range(70):
        clock.now += 1
        shown.advance(1, loss=torch.tensor(0.5))
    shown.close()
    assert log.getvalue().splitlines() == [
        "attack: 30/100 iterations, loss 0.5, 1.0 s each, 1 min 10 s left",
        "attack: 60/100 iterations, loss 0.5, 1.0 s each, 40 s left",
    ]


def test_what_an_earlier_process_did_says_nothing_about_the_speed(clock: Clock) -> None:
    log = io.StringIO()
    shown = Progress(100, "attack", "iterations", stream=log)
    shown.skip(80)
    clock.now += 40
    shown.advance(10)
    assert log.getvalue() == "attack: 90/100 iterations, 4.0 s each, 40 s left\n"


def test_more_than_was_planned_has_no_time_left(clock: Clock) -> None:
    log = io.StringIO()
    shown = Progress(4, "attack", "iterations", stream=log)
    clock.now += 40
    shown.advance(5, loss=torch.tensor(0.5))
    assert log.getvalue() == "attack: 5 iterations, 4 planned, loss 0.5, 8.0 s each\n"


def test_a_terminal_gets_a_bar_with_the_loss(clock: Clock) -> None:
    terminal = Terminal()
    shown = Progress(10, "attack", "iterations", stream=terminal)
    shown.skip(5)
    clock.now += 1
    shown.advance(1, loss=0.25)
    shown.write("victim 1 is done")
    shown.advance(4, loss=0.125)
    shown.close()
    text = terminal.getvalue()
    assert "attack" in text
    assert "10/10" in text
    assert "loss=0.25" in text
    assert "victim 1 is done\n" in text


def test_other_processes_are_quiet(clock: Clock) -> None:
    terminal = Terminal()
    shown = Progress(10, "attack", "iterations", quiet=True, stream=terminal)
    clock.now += 100
    shown.advance(5, loss=1.0)
    shown.write("nothing")
    shown.close()
    assert terminal.getvalue() == ""
    assert shown.done == 5


def test_a_figure_is_read_only_when_it_is_shown(clock: Clock) -> None:
    class Costly(float):
        def __float__(self) -> float:
            raise AssertionError("read, which waits for the device")

    shown = Progress(10, "attack", "iterations", stream=io.StringIO())
    shown.advance(1, loss=Costly(1.0))
