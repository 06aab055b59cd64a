"""Requests to end soon: SIGTERM, and the SIGUSR1 that batch systems are asked to send some time before they end a job.

The first is only noted, for the program to act on between two steps. The same signal once more ends the process at once, also while it
waits inside MPI: Python's own handlers would not be called there, so a thread hears of signals through a pipe.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPED = 75
"""Exit status of a run that was asked to end, saved, and is to be started again (EX_TEMPFAIL of sysexits.h)."""

NUMBERS = (signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """The signals that have come; called, it names the first one, or None."""

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self._seen: list[int] = []
        self._before: dict[signal.Signals, Any] = {number: signal.signal(number, _noted) for number in numbers}

    def __call__(self) -> str | None:
        return signal.Signals(self._seen[0]).name if self._seen else None

    def leave(self, number: signal.Signals) -> None:
        """Let a signal act as it did before; if it has come, it does so now."""
        if number in self._before:
            signal.signal(number, self._before.pop(number))
            if number in self._seen:
                os.kill(os.getpid(), number)

    def ignore(self) -> None:
        """Note nothing more, for good: a launcher ends the other ranks by SIGTERM when the first one ends with a status, and theirs must be
        the same."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._before.clear()

    def listen(self, hears: int) -> None:
        """Take in signals from a pipe until it is closed."""
        while heard := os.read(hears, 1):
            if heard[0] in self._before and heard[0] in self._seen:
                os._exit(128 + heard[0])
            if heard[0] in self._before:
                self._seen.append(heard[0])

    def close(self) -> None:
        """Let all signals act as before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def stop_signals(numbers: Sequence[signal.Signals] = NUMBERS) -> Iterator[Stop]:
    """Note these signals in this block; yields the `Stop` that they are noted in.

    A block that ends with SystemExit leaves them ignored. In another thread than the main one nothing is noted, and signals act as before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Stop(())
        return
    hears, told = os.pipe()
    os.set_blocking(told, False)
    pipe_before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)  # before handlers that do nothing else
    stop = Stop(numbers)
    thread = threading.Thread(target=stop.listen, args=(hears,), name="lbpar signals", daemon=True)
    thread.start()
    try:
        yield stop
    except SystemExit:
        stop.ignore()
        raise
    finally:
        signal.set_wakeup_fd(pipe_before)
        stop.close()
        os.close(told)
        thread.join()
        os.close(hears)


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """In this block SIGTERM raises SystemExit, so that a command that waits for others ends them as at Ctrl-C. Main thread only."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _noted(number: int, frame: FrameType | None) -> None:
    """What Python has to do: nothing, the thread has heard of it."""
