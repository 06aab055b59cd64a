"""pytest plugin for runs under mpirun: rank 0 reports, the other ranks speak only if something failed there.

Load it with ``-p tests.util.rank_output``. Only the launcher's variables are read, MPI itself is not needed.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import pytest

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or os.environ.get("PMIX_RANK") or 0)
_kept = io.StringIO()


class _WithoutNul:
    """Open MPI's version string, printed by pytest-mpi, ends in a NUL, which makes a log a binary file."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(text.replace("\0", ""))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter._tw._file = _kept if RANK else _WithoutNul(reporter._tw._file)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_failed] = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if RANK and config.stash.get(_failed, True):
        text = "".join(f"[rank {RANK}] {line}\n" for line in _kept.getvalue().splitlines())
        print(text, end="", file=sys.stderr, flush=True)


_failed = pytest.StashKey[bool]()
