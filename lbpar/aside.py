"""Work that goes on in a second process while this one does something else."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def aside(work: Callable[[], T], fork: bool = True) -> Iterator[Callable[[], T]]:
    """Start work in a forked process; what the block gets waits for the result, which comes back pickled.

    This process does the work itself, when it is asked for the result, where it may not fork: without ``fork``, beside other threads or
    MPI, and where the system has no further process. So it does if the other one fails, which shows the error here.
    """
    if not fork or threading.active_count() > 1 or "mpi4py.MPI" in sys.modules or not hasattr(os, "fork"):
        yield work
        return
    here, there = os.pipe()
    try:
        child = os.fork()
    except OSError:
        os.close(here)
        os.close(there)
        yield work
        return
    if child == 0:
        try:
            with open(there, "wb") as out:
                pickle.dump(work(), out)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(there)
    ended = False
    with open(here, "rb") as made:

        def result() -> T:
            nonlocal ended
            data = made.read()
            ended, status = True, os.waitpid(child, 0)[1]
            return work() if status else pickle.loads(data)

        try:
            yield result
        finally:
            if not ended:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
