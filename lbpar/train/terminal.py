"""Is a person watching? Under an MPI launcher only the launcher knows: it passes on what the ranks print.

Open MPI gives rank 0 a pseudo-terminal for standard output even if its own goes to a file, and a pipe for standard
error even on a terminal. So where a launcher started this process, the launcher's own files are looked at (Linux'
``/proc``). Where that cannot be done (another node, another system), nobody is taken to watch.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from lbpar.transport.launch import launched_ranks

LAUNCHERS = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "prte", "orterun", "hydra_pmi_proxy", "srun"})
PROC = Path("/proc")


def is_terminal(stream: TextIO) -> bool:
    """Whether a person watches the stream: a terminal, and not a CI job's."""
    if os.environ.get("CI") or os.environ.get("TERM") == "dumb":
        return False
    if _number(stream) is not None and launched_ranks() is not None:
        return _launcher_terminal(stream) is not None
    return stream.isatty()


def columns(stream: TextIO) -> int:
    """Width of the terminal on which a stream ends up; 80 if that is unknown."""
    path = _launcher_terminal(stream) if launched_ranks() is not None else None
    if path is None:
        return shutil.get_terminal_size((80, 24)).columns
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.get_terminal_size(fd).columns or 80
        finally:
            os.close(fd)
    return 80


def launcher(proc: Path = PROC, pid: int | None = None) -> int | None:
    """Process number of the outermost launcher above this process on this node, or None."""
    found = None
    pid = os.getppid() if pid is None else pid
    with suppress(OSError, ValueError, IndexError):
        while pid > 1:
            if (proc / str(pid) / "comm").read_text().strip() not in LAUNCHERS:
                break
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


def _launcher_terminal(stream: TextIO) -> str | None:
    fd, pid = _number(stream), launcher()
    return terminal_of(pid, fd) if pid is not None and fd is not None else None


def _number(stream: TextIO) -> int | None:
    """1 for standard output, 2 for standard error, None for anything else."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None
    return fd if fd in (1, 2) else None
