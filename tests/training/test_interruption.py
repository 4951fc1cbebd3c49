"""Signals become one exception, at once or between two steps, and the handlers that were there before come back."""

from __future__ import annotations

import signal
import threading

import pytest

from lit_recon.training.progress import Interrupted, deferred_interruption, interruptible

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@BOTH
def test_a_signal_interrupts_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=number.name) as caught, interruptible():
        signal.raise_signal(number)
    assert caught.value.number == number
    assert signal.getsignal(number) is before


def test_nothing_that_catches_exceptions_swallows_an_interruption() -> None:
    assert not issubclass(Interrupted, Exception)


@BOTH
def test_a_deferred_signal_waits_to_be_asked_for(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with deferred_interruption() as arrived:
        assert arrived() is None
        signal.raise_signal(number)
        assert arrived() == number
    assert signal.getsignal(number) is before


def test_a_second_signal_does_not_wait() -> None:
    with deferred_interruption():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)


def test_other_threads_leave_the_handlers_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with deferred_interruption() as arrived, interruptible():
            seen.append((arrived(), signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
