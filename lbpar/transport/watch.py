"""Find out why a job stands still.

``Watch`` is told when a rank starts and ends to wait. If nothing happens for a given time, it writes where the rank is
and the stacks of all its threads to standard error; if a rank waits for as long again, it ends the job. All ranks of
a job that hangs do so at about the same time, so the dumps together show who waits for whom. A rank that waits for nobody
may be at work on something long, and ends nothing.

``kill -USR2`` on a rank, or on ``mpirun``, which passes it on, shows the stacks at any time.
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
DEFAULT = 600.0
START = 120.0
"""The limit while ranks start, unless ``LBPAR_HANG_SECONDS`` says otherwise: they have nothing long to do yet."""

FOLDER = "LBPAR_STACKS"
IDLE = "not waiting for other ranks"


class Watch:
    """A thread that looks whether a rank makes progress.

    Parameters
    ----------
    rank : int
        Named in messages.
    seconds : float
        Time without progress after which stacks are shown; after twice the time of waiting ``on_hang`` is called.
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
        self._state = (IDLE, time.monotonic(), seconds)  # replaced as a whole: another thread reads it
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lbpar watch", daemon=True)
        self._thread.start()

    def enter(self, what: str, seconds: float | None = None) -> None:
        """The rank begins to wait for ``what``; ``seconds`` is a limit for this wait."""
        self._state = (f"waiting for {what}", time.monotonic(), self.seconds if seconds is None else seconds)

    def leave(self) -> None:
        """The wait is over."""
        self._state = (IDLE, time.monotonic(), self.seconds)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        shown = None
        while not self._stop.wait(min(self.seconds / 8, 10.0)):
            state = what, since, seconds = self._state
            still = time.monotonic() - since
            if still > seconds and shown is not state:
                shown = state
                self._show(f"lbpar: rank {self.rank}: no progress for {still:.0f} s, {what}. Stacks:")
            if still > 2 * seconds and what != IDLE and self.on_hang is not None:
                self.on_hang(
                    f"lbpar: error: rank {self.rank}: no progress for {still:.0f} s, {what}; the job is "
                    f"ended. Look for a rank that died, was stopped or does something else; if this may take so long, set {SECONDS} to more "
                    f"than {seconds:g} (0: no limit)."
                )
                return

    def _show(self, message: str) -> None:
        print(message, file=self._out, flush=True)
        faulthandler.dump_traceback(self._out, all_threads=True)


def hang_seconds(default: float = DEFAULT) -> float:
    """The limit of ``LBPAR_HANG_SECONDS``; 0 means no watch."""
    text = os.environ.get(SECONDS) or f"{default:g}"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"environment: {SECONDS}={text!r}, expected a number of seconds, or 0 for no limit.")
    return seconds


def stacks_on_signal(rank: int) -> None:
    """Show the stacks of all threads on SIGUSR2, even while the rank is inside MPI."""
    if hasattr(signal, "SIGUSR2"):
        faulthandler.register(signal.SIGUSR2, file=stack_file(rank), all_threads=True)


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
