"""One job at a time writes into a run directory: it holds the file system's own lock on a file that names it.

    run.lock    {"host": "node17", "pid": 4711, "job": "88412", "since": "2026-01-31 18:02:11"}

The lock ends with the process that holds it, however that ends, on another node of a network file system too. Where a file
system knows no locks between nodes a second job gets in; it puts its own name into the file, and the first one stops.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import time
from pathlib import Path
from typing import IO, Self

from lbpar.errors import CheckpointError

log = logging.getLogger(__name__)

_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID", "OAR_JOB_ID")


class RunLock:
    """Held from making it until `release`; also a context manager. One process of a run makes it.

    Parameters
    ----------
    out : path
        The run directory; it exists.

    Raises
    ------
    CheckpointError
        Another job holds it, or the directory cannot be written.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.path = Path(out) / "run.lock"
        job = next((os.environ[name] for name in _JOBS if os.environ.get(name)), None)
        me = {"host": platform.node(), "pid": os.getpid(), "job": job, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self._text = json.dumps(me)
        self._file = _lock(self.path)
        while not self._lies_there():  # whoever held it before has removed it in between
            self._file.close()
            self._file = _lock(self.path)
        self._file.truncate(0)
        self._file.write(self._text)
        self._file.flush()

    def check(self) -> None:
        """Is it still ours? Ask before writing.

        Raises
        ------
        CheckpointError
            It is not: it was deleted, or another job took it where the file system knows no locks.
        """
        try:
            ours = self._lies_there() and self.path.read_text(encoding="utf-8") == self._text
        except OSError:  # a server that does not answer for a while takes nothing away
            return
        if not ours:
            raise CheckpointError(
                f"run.out: {self.path} is no longer this job's: {_holder(self.path)}. Nothing more is written; start again with "
                "--resume when nobody else uses the directory."
            )

    def release(self) -> None:
        """Give it up; a second call does nothing."""
        if not self._file.closed:
            if self._lies_there():
                self.path.unlink(missing_ok=True)
            self._file.close()

    def _lies_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.release()


def check_free(out: str | os.PathLike[str]) -> None:
    """Refuse a run directory that another job holds.

    Raises
    ------
    CheckpointError
        Names the other job.
    """
    path = Path(out) / "run.lock"
    if path.exists():
        _lock(path).close()


def _lock(path: Path) -> IO[str]:
    """The file, open and locked."""
    try:
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed when the lock is given up
    except OSError as error:
        raise CheckpointError(
            f"run.out: {path} cannot be written: {error.strerror}; choose another directory (--set run.out=...)."
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CheckpointError(
            f"run.out: {path.parent} is in use: {_holder(path)}. Wait until it ends, or choose another directory "
            f"(--set run.out=...). If it is certainly gone, delete {path}."
        ) from None
    except OSError as error:
        log.warning("run.out: %s cannot be locked: %s; let no other job write there", path.parent, error.strerror)
    return file


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        job = f", job {holder['job']}" if holder["job"] else ""
        return f"held by process {holder['pid']} on {holder['host']}{job}, since {holder['since']}"
    except FileNotFoundError:
        return "it was removed"
    except (OSError, ValueError, TypeError, KeyError):
        return "held by a job that has not said yet which"
