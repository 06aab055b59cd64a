"""NCCL waits for ever for a rank that does not come: the job ends all the same, and says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "a bug on one rank"),
        ("dies", ""),
        ("stops", "no progress for"),
        ("before", "no progress for"),
    ],
)
def test_a_rank_that_does_not_come_ends_the_job(how: str, said: str) -> None:
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun")
    env = {n: v for n, v in os.environ.items() if not n.startswith(("OMPI_COMM", "PMIX", "PMI_"))}
    env |= {
        "LBPAR_HANG_SECONDS": "3" if how in ("stops", "before") else "60",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    command = [mpirun, "-n", "2", sys.executable, "-m", "tests.util.on_stand_in", "tests.util.leaves", how]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert said in done.stderr, done.stderr[-3000:]
    if said.startswith("no progress"):
        what = "the GPU" if how == "stops" else "NCCL, making the group over axes (0,)"
        assert "rank 0: no progress for" in done.stderr and f"waiting for {what}; the job is ended" in done.stderr
