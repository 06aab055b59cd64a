"""One job at a time writes into a run directory: a file names the job that does, and shows that it lives.

    run.lock    {"host": "node17", "pid": 4711, "job": "88412", "since": "2026-01-31 18:02:11", ...}

The file is made so that only one of many jobs can make it, on network file systems too, and its time of change is moved on every few
seconds. Whether a lock was left by a job that died is seen at once where that job ran on the same machine; elsewhere by its time.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lbpar.errors import CheckpointError

log = logging.getLogger(__name__)

BEAT = 10.0
"""Seconds between signs of life."""

STALE = 60.0
"""Seconds without a sign of life after which a job on another machine counts as dead."""

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
        self._text = json.dumps(_me())
        while not self._make():
            check_free(out)
        self._stop = threading.Event()
        threading.Thread(target=self._beat, name="lbpar lock", daemon=True).start()

    def check(self) -> None:
        """Is it still ours? Ask before writing: whoever was stopped for long may have been taken for dead.

        Raises
        ------
        CheckpointError
            It is not.
        """
        if not self._ours():
            raise CheckpointError(
                f"run.out: {self.path} is no longer this job's: {_holder(self.path)}. Nothing more is written; start again with "
                "--resume when nobody else uses the directory."
            )

    def release(self) -> None:
        """Give it up; a second call does nothing."""
        if not self._stop.is_set():
            self._stop.set()
            if self._ours():
                self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _make(self) -> bool:
        try:
            with open(self.path, "x", encoding="utf-8") as file:
                file.write(self._text)
        except FileExistsError:
            return False
        except OSError as error:
            raise CheckpointError(
                f"run.out: {self.path} cannot be written: {error.strerror}; choose another directory (--set run.out=...)."
            ) from error
        return True

    def _ours(self) -> bool:
        try:
            return self.path.read_text(encoding="utf-8") == self._text
        except FileNotFoundError:
            return False
        except OSError:  # a server that does not answer for a while takes nothing away
            return True

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            with suppress(OSError):
                if self._ours():
                    os.utime(self.path)


def check_free(out: str | os.PathLike[str]) -> None:
    """Refuse a run directory that another job holds; the lock of a job that is gone is removed, with a word.

    Raises
    ------
    CheckpointError
        Names the other job.
    """
    path = Path(out) / "run.lock"
    first: os.stat_result | None = None
    while True:
        try:
            with open(path, encoding="utf-8") as file:  # opening makes network file systems look at the file anew
                text, facts = file.read(), os.fstat(file.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise CheckpointError(f"run.out: {path} cannot be read: {error.strerror}.") from error
        first = first or facts
        holder = _parse(text)
        near = holder.get("place") is not None and holder["place"] == _me()["place"]
        if (near and _runs(holder)) or facts.st_mtime_ns > first.st_mtime_ns:
            raise CheckpointError(
                f"run.out: {path.parent} is in use: {_words(holder)}. Wait until it ends, or choose another directory "
                f"(--set run.out=...). If it is certainly gone, delete {path}."
            )
        silent = _now(path) - facts.st_mtime
        if near or silent > STALE:
            break
        if first is facts:
            log.warning(
                "run.out: %s: %s; waiting up to %.0f s for a sign of life", path, _words(holder), STALE - silent
            )
        time.sleep(1.0)
    grave = path.with_name(f".{path.name}-{platform.node()}-{os.getpid()}")
    with suppress(FileNotFoundError):  # another job was faster
        path.rename(grave)
        if grave.read_text(encoding="utf-8") == text:
            log.warning("run.out: %s: %s; it is gone, its lock is removed", path, _words(holder))
        else:  # another job was faster still, and this lock is its own
            with suppress(OSError):
                os.link(grave, path)
        grave.unlink()


def _now(path: Path) -> float:
    """The file system's own time: clocks of machines differ."""
    probe = path.with_name(f".{path.name}-now-{platform.node()}-{os.getpid()}")
    try:
        probe.write_text("", encoding="utf-8")
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with suppress(OSError):
            probe.unlink()


def _me() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "job": next((os.environ[name] for name in _JOBS if os.environ.get(name)), None),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "born": _born(os.getpid()),
        "place": _place(),
    }


def _place() -> str | None:
    """Where process numbers mean the same: this boot of this machine, this container. None where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _born(pid: int) -> str | None:
    """When a process was started, in ticks since the machine was; None if it does not run."""
    try:
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else facts[18]
    except (OSError, IndexError, ValueError):
        return None


def _runs(holder: dict[str, Any]) -> bool:
    return holder["born"] is not None and holder["born"] == _born(holder["pid"])


def _holder(path: Path) -> str:
    try:
        return _words(_parse(path.read_text(encoding="utf-8")))
    except OSError:
        return "it was removed"


def _parse(text: str) -> dict[str, Any]:
    try:
        holder = json.loads(text)
        return holder if {"host", "pid", "born", "place"} <= holder.keys() else {}
    except (ValueError, AttributeError):
        return {}


def _words(holder: dict[str, Any]) -> str:
    if not holder:
        return "held by a job that has not said yet which"
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"held by process {holder['pid']} on {holder['host']}{job}, since {holder.get('since')}"
