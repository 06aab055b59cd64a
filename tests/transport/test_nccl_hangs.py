"""NCCL waits for ever for a rank that does not come: the job ends all the same, and says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")


def ended(how: str, **env: str) -> str:
    """What a job of two ranks wrote to standard error, of which the second does not come."""
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun")
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("OMPI_COMM", "PMIX", "PMI_"))}
    kept |= {
        "LBPAR_HANG_SECONDS": "3" if how in ("stops", "before") else "60",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    command = [mpirun, "-n", "2", sys.executable, "-m", "tests.util.on_stand_in", "tests.util.leaves", how]
    done = subprocess.run(command, env=kept | env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    return done.stderr


def aborted(stderr: str, rank: int) -> int:
    return stderr.count(f"[rank {rank} aborts a communicator of NCCL]")


@pytest.mark.parametrize(
    ("how", "said", "comms"),
    [
        ("raises", "a bug on one rank", (0, 2)),
        ("aborts", "that is enough", (0, 2)),
        ("dies", "", (0, 0)),
        ("stops", "no progress for", (2, 0)),
        ("before", "no progress for", (1, 0)),
    ],
)
def test_a_rank_that_does_not_come_ends_the_job(how: str, said: str, comms: tuple[int, int]) -> None:
    """The rank that ends it aborts its communicators: that of all ranks, and that of the group if there is one."""
    stderr = ended(how)
    assert said in stderr, stderr[-3000:]
    assert (aborted(stderr, 0), aborted(stderr, 1)) == comms
    if said.startswith("no progress"):
        what = "the GPU" if how == "stops" else "NCCL, making the group over axes (0,)"
        assert "rank 0: no progress for" in stderr and f"waiting for {what}; the job is ended" in stderr


@pytest.mark.parametrize("how", ["raises", "aborts", "stops"])
def test_an_abort_that_hangs_does_not_keep_the_job(how: str) -> None:
    stderr = ended(how, STAND_IN_ABORT="hangs")
    assert aborted(stderr, 0 if how == "stops" else 1) == 2, "neither keeps the other from being tried"
