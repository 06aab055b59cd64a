"""What a process does before it ends a job that has failed: it aborts what would wait for ever for ranks that are gone.

An abort may itself wait for them, so each runs in a thread of its own, and all together have `SECONDS`: after that the job ends without them.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from weakref import WeakSet

SECONDS = 5.0
"""How long aborts may take together."""


class Holder(ABC):
    """Something that holds what has to be aborted, from ``hold`` to ``unhold``."""

    @abstractmethod
    def aborts(self) -> Iterable[Callable[[], object]]:
        """An abort for each thing held. They are called side by side, in threads of their own, and may raise."""


_holders: WeakSet[Holder] = WeakSet()


def hold(holder: Holder) -> None:
    """From now on the end of a failed job aborts what it holds."""
    _holders.add(holder)


def unhold(holder: Holder) -> None:
    """It holds nothing any more that could be aborted."""
    _holders.discard(holder)


def abort_all(seconds: float = SECONDS) -> bool:
    """Abort all that is held, each once; True if that was done within the time."""
    threads = []
    while _holders:
        for abort in _holders.pop().aborts():
            threads.append(threading.Thread(target=_quietly, args=(abort,), name="lbpar abort", daemon=True))
            threads[-1].start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _quietly(abort: Callable[[], object]) -> None:
    with suppress(Exception):  # the job has a reason for its end already
        abort()
