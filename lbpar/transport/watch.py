"""Find out why a job stands still.

``Watch`` is told when a rank starts and ends to wait. If nothing happens for a given time, it writes where the rank is
and the stacks of all its threads to standard error; if nothing happens for as long again, it ends the job. All ranks of
a job that hangs do so at about the same time, so the dumps together show who waits for whom.

``kill -USR1`` on a rank, or on ``mpirun``, which passes it on, shows the stacks at any time.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from lbpar.errors import ConfigError

SECONDS = "LBPAR_HANG_SECONDS"
FOLDER = "LBPAR_STACKS"
IDLE = "not waiting for other ranks"


class Watch:
    """A thread that looks whether a rank makes progress.

    Parameters
    ----------
    rank : int
        Named in messages.
    seconds : float
        Time without progress after which stacks are shown; after twice the time ``on_hang`` is called.
    on_hang : callable, optional
        Called with a message; should end the job.
    out : text file, optional
        With a file descriptor; default standard error, or a file per rank in the folder ``LBPAR_STACKS``.
    """

    def __init__(
        self, rank: int, seconds: float, on_hang: Callable[[str], object] | None = None, out: TextIO | None = None
    ) -> None:
        self.rank, self.seconds, self.on_hang = rank, seconds, on_hang
        self._out = out if out is not None else stack_file(rank)
        self._what = IDLE
        self._moved = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lbpar watch", daemon=True)
        self._thread.start()

    def enter(self, what: str) -> None:
        """The rank begins to wait for ``what``."""
        self._what, self._moved = f"waiting for {what}", time.monotonic()

    def leave(self) -> None:
        """The wait is over."""
        self._what, self._moved = IDLE, time.monotonic()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        shown = None
        while not self._stop.wait(self.seconds / 8):
            moved, what = self._moved, self._what
            still = time.monotonic() - moved
            if still > self.seconds and shown != moved:
                shown = moved
                self._show(f"lbpar: rank {self.rank}: no progress for {still:.0f} s, {what}. Stacks:")
            if still > 2 * self.seconds and self.on_hang is not None:
                self.on_hang(
                    f"lbpar: error: rank {self.rank}: no progress for {still:.0f} s, {what}; the job is "
                    f"ended. {SECONDS}={self.seconds:g} set this limit."
                )
                return

    def _show(self, message: str) -> None:
        print(message, file=self._out, flush=True)
        faulthandler.dump_traceback(self._out, all_threads=True)


def hang_seconds() -> float:
    """The limit of ``LBPAR_HANG_SECONDS``; 0, the default, means no watch."""
    text = os.environ.get(SECONDS, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"environment: {SECONDS}={text!r}, expected a number of seconds, or 0 for no limit.")
    return seconds


def stacks_on_signal(rank: int) -> None:
    """Show the stacks of all threads on SIGUSR1, even while the rank is inside MPI."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=stack_file(rank), all_threads=True)


_files: dict[int, TextIO] = {}


def stack_file(rank: int) -> TextIO:
    """Standard error, or ``rank<r>.txt`` in the folder that ``LBPAR_STACKS`` names."""
    folder = os.environ.get(FOLDER)
    if folder:
        if rank not in _files:
            Path(folder).mkdir(parents=True, exist_ok=True)
            # Kept open on purpose: a signal handler writes to it.
            _files[rank] = open(Path(folder) / f"rank{rank}.txt", "a")  # noqa: SIM115
        return _files[rank]
    return sys.__stderr__ if sys.__stderr__ is not None else sys.stderr
