"""Requests to end soon: SIGTERM, and the SIGUSR1 that batch systems are asked to send some time before they end a job.

The first is only noted, for the program to act on between two steps. The same signal once more ends the process at once, also while it
waits inside MPI: Python's own handlers would not be called there, so a thread hears of signals through a pipe.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

STOPPED = 75
"""Exit status of a run that was asked to end, saved, and is to be started again (EX_TEMPFAIL of sysexits.h)."""

NUMBERS = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def stop_signals(numbers: Sequence[signal.Signals] = NUMBERS) -> Iterator[Callable[[], str | None]]:
    """Note these signals in this block; yields a function that names the first one that came, or None.

    A block that ends with SystemExit leaves them ignored, because a launcher ends the other ranks by SIGTERM when the first one ends with
    a status, and theirs must be the same. In another thread than the main one nothing is noted, and signals act as before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    seen: list[int] = []
    hears, told = os.pipe()
    os.set_blocking(told, False)

    def listen() -> None:
        while heard := os.read(hears, 1):
            if heard[0] in seen:
                os._exit(128 + heard[0])
            if heard[0] in numbers:
                seen.append(heard[0])

    thread = threading.Thread(target=listen, name="lbpar signals", daemon=True)
    thread.start()
    before = {number: signal.signal(number, _noted) for number in numbers}
    pipe_before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    try:
        yield lambda: signal.Signals(seen[0]).name if seen else None
    except SystemExit:
        before = dict.fromkeys(numbers, signal.SIG_IGN)
        raise
    finally:
        signal.set_wakeup_fd(pipe_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(told)
        thread.join()
        os.close(hears)


def _noted(number: int, frame: FrameType | None) -> None:
    """What Python has to do: nothing, the thread has heard of it."""
