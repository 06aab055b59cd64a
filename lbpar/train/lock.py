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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lbpar.errors import CheckpointError

log = logging.getLogger(__name__)

_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID", "OAR_JOB_ID")


@contextmanager
def run_lock(out: str | os.PathLike[str], option: str = "run.out") -> Iterator[Callable[[], None]]:
    """Hold a run directory, which exists. One process of a run does. ``option`` is what the user named it with.

    Yields
    ------
    callable
        Raises CheckpointError if it is no longer ours: the file was deleted, or another job took it where the file system
        knows no locks. Call it before writing.

    Raises
    ------
    CheckpointError
        Another job holds it, or the directory cannot be written.
    """
    path = Path(out) / "run.lock"
    job = next((os.environ[name] for name in _JOBS if os.environ.get(name)), None)
    me = {"host": platform.node(), "pid": os.getpid(), "job": job, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    text = json.dumps(me)
    file = _lock(path, option)
    while not _lies_at(file, path):  # another job that held it before has removed it in between
        file.close()
        file = _lock(path, option)

    def check() -> None:
        try:
            ours = _lies_at(file, path) and path.read_text(encoding="utf-8") == text
        except OSError:  # a server that does not answer for a while takes nothing away
            return
        if not ours:
            raise CheckpointError(
                f"run.out: {path} is no longer this job's: {_holder(path)}. Nothing more is written; start again with "
                "--resume when nobody else uses the directory."
            )

    with file:
        file.truncate(0)
        file.write(text)
        file.flush()
        try:
            yield check
        finally:
            if _lies_at(file, path):
                path.unlink(missing_ok=True)


def _lies_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


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


def _lock(path: Path, option: str = "run.out") -> IO[str]:
    """The file, open and locked."""
    another = "choose another directory (--set run.out=...)" if option == "run.out" else f"choose another {option}"
    try:
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed when the lock is given up
    except OSError as error:
        raise CheckpointError(f"{option}: {path} cannot be written: {error.strerror}; {another}.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CheckpointError(
            f"{option}: {path.parent} is in use: {_holder(path)}. Wait until it ends, or {another}. "
            f"If it is certainly gone, delete {path}."
        ) from None
    except OSError as error:
        log.warning("%s: %s cannot be locked: %s; let no other job write there", option, path.parent, error.strerror)
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
