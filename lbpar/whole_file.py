"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def beside(path: Path, failed: Callable[[str], Exception]) -> Iterator[Path]:
    """A path to write to, in the same folder; what it holds when the block ends well replaces ``path`` in one instant.

    Parameters
    ----------
    path : Path
    failed : callable
        Makes the exception for the user out of the reason for which the file cannot be written.
    """
    part = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
        with suppress(OSError):  # not every file system can
            flush_to_disk(path.parent)
    except OSError as error:
        raise failed(error.strerror or str(error)) from error
    finally:
        with suppress(OSError):  # it has its name, or was never made
            part.unlink()


def flush_to_disk(path: Path) -> None:
    """What was written to a file, or the names in a folder, outlasts a crash of the machine from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
