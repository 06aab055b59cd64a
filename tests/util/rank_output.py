"""pytest plugin for runs under mpirun: rank 0 reports, the other ranks speak only if something failed there.

Load it with ``-p tests.util.rank_output``. Only the launcher's variables are read, MPI itself is not needed.
"""

from __future__ import annotations

import io
import os
import sys

import pytest

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or os.environ.get("PMIX_RANK") or 0)
_text = io.StringIO()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if RANK and reporter is not None:
        reporter._tw._file = _text


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if "failed" in _text.getvalue() or "error" in _text.getvalue():
        lines = _text.getvalue().splitlines()
        print("\n".join(f"[rank {RANK}] {line}" for line in lines), file=sys.stderr, flush=True)
