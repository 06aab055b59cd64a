"""A thread that lets messages progress while kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Event, Thread
from types import TracebackType
from typing import Self

PAUSE = 2e-4
"""Seconds between looks: short against a message of a megabyte, long against what a look costs."""


class Background:
    """Calls ``look`` every now and then from a thread of its own, inside a ``with`` block.

    Parameters
    ----------
    look : callable
        Must allow calls from another thread; an MPI library must have been started for that (MPI_THREAD_MULTIPLE, which
        mpi4py asks for).
    running : callable, optional
        Gives the block in which the thread looks: `lbpar.engine.base.Engine.running`, where that asks about work of a device. To CUDA a
        thread is on the first device until it says otherwise.
    """

    def __init__(
        self, look: Callable[[], None], running: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._look, self._running, self._over = look, running, Event()
        self._thread = Thread(target=self._run, name="lbpar progress", daemon=True)

    def _run(self) -> None:
        with self._running():
            while not self._over.wait(PAUSE):
                self._look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
