"""How many threads one process may use. Imports nothing heavy: BLAS libraries read their limits when they are first loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence

LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE", "PMI_SIZE")

_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID", "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID",
)  # fmt: skip
_found = 0


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_ranks() -> int:
    """Number of ranks on this node, as far as the launcher says."""
    for name in _LOCAL_SIZES:
        head = os.environ.get(name, "").split("(")[0].split(",")[0]
        if head.isdigit() and int(head) > 0:
            return int(head)
    return 1


def local_rank() -> int:
    """This rank's number among those of its node: as the launcher says, or else as `ranks_found` counted."""
    return next((int(os.environ[name]) for name in _LOCAL_RANKS if os.environ.get(name, "").isdigit()), _found)


def ranks_found(hosts: Sequence[str], rank: int) -> None:
    """Take a rank's number on its node from the nodes of all ranks, for launchers that do not say it."""
    global _found
    _found = hosts[:rank].count(hosts[rank])


def node_cores() -> int:
    """Cores of this node that the job may use: those of the launcher, which no binding of single ranks narrows."""
    try:
        return len(os.sched_getaffinity(os.getppid()))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def share() -> int:
    """Threads for this process: an equal share of the node's cores, but no more than it is bound to.

    ``OMP_NUM_THREADS`` wins where it is set.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if given.isdigit() and int(given) > 0:
        return int(given)
    return max(1, min(cores(), node_cores() // local_ranks()))


def limit_libraries() -> None:
    """Keep BLAS and OpenMP to this process' share. Call before NumPy is imported; variables that are set stay."""
    threads = str(share())
    for name in LIMITS:
        os.environ.setdefault(name, threads)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")  # looking for them reads the records of all packages
