"""64 ranks in a 4 x 4 x 4 mix of samples, filters and space, on however few cores there are, equal one rank."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from lbpar.launcher import launched_ranks


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_64_ranks_equal_one(tmp_path):
    if launched_ranks() is not None:
        pytest.skip("under a launcher already")
    pytest.importorskip("mpi4py")
    pytest.importorskip("sklearn")
    if shutil.which("mpirun", path=str(Path(sys.executable).parent)) is None and shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    from tests.bench.digits64 import compare

    one, many, worst = compare(tmp_path, 64, 3)
    assert many["procs"] == 64
    assert worst < 1e-10
    # Of weights, momentum and running statistics a rank holds a quarter; what no layer splits by filters is whole.
    assert many["state_bytes"] < 0.3 * one["state_bytes"]
