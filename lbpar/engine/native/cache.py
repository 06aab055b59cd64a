"""A folder for compiled code: a file is named after its content, and nothing is loaded that another user could have put there."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lbpar.errors import EngineError

log = logging.getLogger(__name__)


def private(folder: Path) -> Path:
    """Make a folder for this user alone, and return its real path, free of symbolic links.

    Raises
    ------
    EngineError
        Others may write there, or could put another folder in its place.
    OSError
        It cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    real = folder.resolve()
    for path in (real, *real.parents):
        facts, owners = path.stat(), {os.getuid()} if path == real else {os.getuid(), 0}
        sticky = path != real and facts.st_mode & stat.S_ISVTX  # as /tmp: nobody can move what is another's
        if facts.st_uid not in owners or (facts.st_mode & 0o022 and not sticky):
            raise EngineError(
                f"{folder}: {path} belongs to user {facts.st_uid} and has mode {stat.S_IMODE(facts.st_mode):o}, expected one that "
                f"only user {os.getuid()} may write; `chmod go-w` it, or name another folder."
            )
    return real


def find(folder: Path, name: str, suffix: str = ".so") -> Path | None:
    """A whole file that `keep` put into a `private` folder; damaged ones are removed, and the log says so."""
    for path in sorted(folder.glob(f"{name}-*{suffix}")):
        with suppress(FileNotFoundError):  # another rank may be removing the same
            facts = path.lstat()
            ours = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022
            if ours and path.name == _named(name, path.read_bytes(), suffix):
                return path
            log.warning("%s is damaged or not this user's alone: removed, and made again", path)
            path.unlink()
    return None


def find_or_make(folder: Path, name: str, make: Callable[[], Path | None], suffix: str = ".so") -> Path | None:
    """What `find` finds, or what ``make`` makes: one process of the ranks on a node makes it, while the others sleep."""
    if found := find(folder, name, suffix):
        return found
    with _turn(folder):
        return find(folder, name, suffix) or make()


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; without it after a minute, or where its file system has none: what is made twice is equal."""
    file = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(file)


def keep(folder: Path, name: str, file: Path) -> Path:
    """Move a file of the same file system into the folder, where it appears whole; its new path."""
    file.chmod(0o700)
    with file.open("rb") as made:
        path = folder / _named(name, made.read(), file.suffix)
        os.fsync(made.fileno())  # or a crash of the machine may leave the name without the content
    file.replace(path)
    return path


def temporary(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder inside, for what is not whole yet."""
    return tempfile.TemporaryDirectory(prefix=".part-", dir=folder)


def _named(name: str, content: bytes, suffix: str) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()[:32]}{suffix}"
