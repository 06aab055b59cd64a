"""Is a person watching? Under an MPI launcher only the launcher knows: it passes on what the ranks print.

Open MPI gives rank 0 a pseudo-terminal for standard output even if its own goes to a file, and a pipe for standard
error even on a terminal; and it holds back what does not end a line, so that a progress bar would show only when it is
over. So where a launcher started this process, the launcher's own files are looked at (Linux' ``/proc``), and if they
are a terminal, it is written to directly. Where that cannot be done (another node, another system), it is assumed
that nobody watches.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TextIO

from lbpar.launcher import launched_ranks
from lbpar.streams import ERRORS

LAUNCHERS = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "prte", "orterun", "hydra_pmi_proxy", "srun"})
PROC = Path("/proc")


def screen(stream: TextIO) -> TextIO:
    """The terminal on which the launcher shows what is written to standard output or error; else the stream itself."""
    fd = _number(stream)
    if fd is None or launched_ranks() is None:
        return stream
    pid = launcher()
    path = terminal_of(pid, fd) if pid is not None else None
    return (_open(path) if path is not None else None) or stream


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person watches the stream: a terminal, and not a CI job's. Ask it about what `screen` returned."""
    if os.environ.get("CI") or os.environ.get("TERM") == "dumb":
        return False
    if _number(stream) is not None and launched_ranks() is not None:
        return False  # a terminal only in looks
    return stream is not None and stream.isatty()


def columns(stream: TextIO) -> int:
    """Width of the terminal that a stream is; 80 if that is unknown."""
    with suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return shutil.get_terminal_size((80, 24)).columns


def launcher(proc: Path = PROC, pid: int | None = None) -> int | None:
    """Process number of the outermost launcher above this process on this node, or None."""
    found = None
    pid = os.getppid() if pid is None else pid
    with suppress(OSError, ValueError, IndexError):
        while pid > 1 and (proc / str(pid) / "comm").read_text().strip() in LAUNCHERS:
            found = pid
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def terminal_of(pid: int, fd: int, proc: Path = PROC) -> str | None:
    """Path of the terminal that a process has open as ``fd``, or None if that is something else."""
    try:
        path = os.readlink(proc / str(pid) / "fd" / str(fd))
    except OSError:
        return None
    return path if path.startswith(("/dev/pts/", "/dev/tty", "/dev/console")) else None


@cache
def _open(path: str) -> TextIO | None:
    """A terminal for writing; stays open to the end of the process."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        return open(fd, "w", buffering=1, encoding=sys.stdout.encoding, errors=ERRORS)
    except OSError:
        return None


def _number(stream: TextIO | None) -> int | None:
    """1 for standard output, 2 for standard error, None for anything else."""
    try:
        fd = stream.fileno() if stream is not None else None
    except (OSError, ValueError, AttributeError):
        return None
    return fd if fd in (1, 2) else None
