"""HDF5 files that are written whole or fail cleanly."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from types import FrameType
from typing import Any


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A new HDF5 file, closed and on disk when the block ends well, and a check to call after writing large parts of it.

    After a failure the file holds anything; delete it. HDF5 cannot give up a file: what a full disk did not take, it tries to write
    again when the file is closed and when the process ends, and crashes there. So it writes through an object of ours that never
    tells it; the check raises instead, and so does the end of the block.

    Raises
    ------
    OSError
        The file cannot be written; the disk may be full.
    """
    import h5py

    with open(path, "w+b", buffering=0) as raw:
        sink = _Sink(raw)
        file = h5py.File(sink, "w")
        try:
            yield file, sink.check
        finally:
            with uninterrupted():
                file.close()
        sink.check()
        os.fsync(raw.fileno())


class _Sink:
    """A file that after its first failure takes everything and stores nothing."""

    def __init__(self, raw: FileIO) -> None:
        self._raw = raw
        self._error: BaseException | None = None
        self.read, self.readinto, self.seek, self.tell = raw.read, raw.readinto, raw.seek, raw.tell

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while self._error is None and rest:
                rest = rest[self._raw.write(rest) :]
        except BaseException as e:  # noqa: BLE001 - raised by `check`
            self._error = e
        return size

    def truncate(self, size: int) -> int:
        try:
            if self._error is None:
                self._raw.truncate(size)
        except OSError as e:
            self._error = e
        return size

    def flush(self) -> None:
        """Nothing is held back."""

    def check(self) -> None:
        if self._error is not None:
            raise self._error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt (Ctrl-C) that comes inside this block comes at its end, a second one at once.

    Where h5py lets go of an object, Python swallows the exception; the program would go on as if nobody had interrupted it.
    """
    before = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread() or before is None
    ):  # only that one is interrupted by Python
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came and callable(before):
            before(number, frame)
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
