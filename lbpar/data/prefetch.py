"""Read ahead in a background thread, so that the next batch is there when the last step ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Full, Queue
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Prefetcher(Generic[Item, Result]):
    """Iterate over ``load(item)`` for each item, in order, up to ``depth`` results ahead.

    Use it in a ``with`` block or read it to its end; leaving early stops the thread, and waits for the read under way.
    An exception of ``load`` (or of the items) is raised where the failed result is asked for.

    Parameters
    ----------
    load : callable
        Called in the thread, one item at a time; must not communicate between ranks.
    items : iterable
        Consumed in the thread.
    depth : int
        Results kept ready; 0 loads in the caller's thread when asked.
    """

    def __init__(self, load: Callable[[Item], Result], items: Iterable[Item], depth: int = 2) -> None:
        self._load, self._items, self._depth = load, items, depth
        self._ready: Queue[tuple[str, Result | BaseException | None]] = Queue(max(1, depth))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[Result]:
        if self._depth == 0:
            yield from map(self._load, self._items)
            return
        self._start()
        try:
            while not self._stop.is_set():
                kind, value = self._ready.get()
                if kind == "end":
                    return
                if isinstance(value, BaseException) and kind == "error":
                    raise value
                yield value  # type: ignore[misc]
        finally:
            self.close()

    def __enter__(self) -> Prefetcher[Item, Result]:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead; returns when the thread has ended. Safe to call again."""
        self._stop.set()
        while self._thread is not None and self._thread.is_alive():
            try:  # a thread that waits for room sees the stop only once there is some
                self._ready.get_nowait()
            except Empty:
                self._thread.join(0.01)
        self._thread = None

    def _start(self) -> None:
        if self._thread is not None or self._stop.is_set():
            raise RuntimeError("a Prefetcher can be read only once; make a new one for the next epoch")
        # A daemon, so that a rank that dies on an error is not held back by a read.
        self._thread = threading.Thread(target=self._work, name="lbpar-prefetch", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for item in self._items:
                if self._stop.is_set():
                    return
                self._put("result", self._load(item))
            self._put("end", None)
        except BaseException as e:  # noqa: BLE001 - handed over to the consumer
            self._put("error", e)

    def _put(self, kind: str, value: Result | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put((kind, value), timeout=0.1)
            except Full:
                continue
