"""HDF5 files that are written whole or fail cleanly."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[Any]:
    """A new HDF5 file, closed and on disk when the block ends well. After a failure it holds anything; delete it.

    HDF5 cannot give up a file: what a full disk did not take, it tries to write again when the file is closed and when the process
    ends, and crashes there. So after a failure it writes into memory, and ends in peace.

    Raises
    ------
    OSError, RuntimeError
        The file cannot be written; the disk may be full.
    """
    import h5py

    with uninterrupted():
        file = h5py.File(path, "w", locking="best-effort")
        try:
            yield file
            file.flush()
        except BaseException:
            memory = hasattr(os, "memfd_create")
            spare = os.memfd_create("given up") if memory else os.open(os.devnull, os.O_RDWR)
            os.dup2(spare, file.id.get_vfd_handle())
            os.close(spare)
            raise
        finally:
            file.close()
        flush_to_disk(Path(path))


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


def flush_to_disk(path: Path) -> None:
    """What was written to a file, or the names in a folder, outlasts a crash of the machine from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
