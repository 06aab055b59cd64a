"""Read ahead in a background thread, so that the next batch is there when the last step ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def read_ahead(load: Callable[[Item], Result], items: Iterable[Item], depth: int = 2) -> Iterator[Iterator[Result]]:
    """Around a loop over ``load(item)`` for each item, in order, up to ``depth`` results ahead of the one in use.

    Leaving early waits for the read under way and drops the others. An exception of ``load`` is raised where the failed
    result is asked for.

    Parameters
    ----------
    load : callable
        Called in the thread, one item at a time; must not communicate between ranks.
    items : iterable
    depth : int
        Results kept ready; 0 loads in the caller's thread when asked.
    """
    if depth == 0:
        yield map(load, items)
        return
    thread = ThreadPoolExecutor(1, "lbpar-prefetch")

    def results() -> Iterator[Result]:
        ahead: deque[Future[Result]] = deque()
        for item in items:
            ahead.append(thread.submit(load, item))
            if len(ahead) > depth:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    try:
        yield results()
    finally:
        thread.shutdown(cancel_futures=True)
