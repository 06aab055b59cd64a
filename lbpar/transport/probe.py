"""Does this machine's MPI read and write device memory? Asked of the library first, then tried by processes of their own, which may crash.

``MPIX_Query_cuda_support`` tells what a library was built with, not that the path between two processes works; and a library that is not
CUDA-aware ends the process that hands it device memory. So two processes, started by the mpirun beside this Python and with none of the
job's environment, or where that fails one that sends to itself, move a few arrays of a device. They have `SECONDS`. Sums beside the host
come last: if these alone crash or hang, the library is taken, with sums that hold up the host.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.threads import local_rank
from lbpar.transport.mpi import load_mpi

SECONDS = 40.0
"""Limit of one try."""

CHILD = (sys.executable, "-m", "lbpar.transport.probe")
OF_JOBS = (
    "OMPI_", "PMIX_", "PMI_", "PRTE_", "PRRTE_", "SLURM_", "MPI_LOCAL", "MV2_COMM_WORLD_", "HYDRA_", "MPIR_", "FLUX_", "JSM_",
)  # fmt: skip
"""Beginnings of the names of variables by which launchers tell processes of their job."""


@dataclass(frozen=True)
class Found:
    """What is known of the MPI library.

    Attributes
    ----------
    aware : bool
        It takes device memory.
    nonblocking : bool
        In non-blocking collective operations, too.
    why : str
        In words.
    """

    aware: bool
    nonblocking: bool
    why: str


def cuda_aware() -> Found:
    """Ask, then try. Only one rank of a job needs to: the others have the same library."""
    said = _library_says()
    if said is False:
        return Found(False, False, "the MPI library says that it was built without CUDA")
    why = "no try has ended"
    for starter in (*_mpirun(), ()):
        found, why = _try(starter)
        if found:
            return Found(True, "nonblocking" in found, f"{why}{'' if said else ', though the library does not say so'}")
    return Found(False, False, why)


def _library_says() -> bool | None:
    """What the library says of itself; None where it says nothing."""
    try:
        library = ctypes.CDLL(load_mpi().__file__)
    except OSError:
        return None
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI and its kin
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):  # MPICH and its kin; 0 stands for CUDA
        answer = ctypes.c_int(0)
        failed = library.MPIX_GPU_query_support(0, ctypes.byref(answer))
        return None if failed else bool(answer.value)
    return None


def _mpirun() -> list[tuple[str, ...]]:
    """How to start two processes, if there is a way."""
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    return [(found, "-n", "2")] if found else []


def _try(starter: Sequence[str]) -> tuple[str, str]:
    """What the processes of a try wrote, empty if they failed, and how they ended in words."""
    how = f"{'two processes' if starter else 'a process and itself'} of a try"
    try:
        done = subprocess.run(
            [*starter, *CHILD], env=outside(os.environ), capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        wrote = (error.stdout or b"").decode(errors="replace")  # bytes in any case
        ended = f"did not end within {SECONDS:g} s"
    except OSError as error:
        return "", f"{how} could not be started: {error}"
    else:
        status = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        wrote, ended = done.stdout, f"ended with {status}" if done.returncode else ""
    if "moved" not in wrote or ("nonblocking" in wrote and ended):
        return "", f"{how} {ended or 'said nothing'}"
    but = "" if "nonblocking" in wrote else f", but {ended or 'ended'} in sums beside the host"
    return wrote, f"{how} moved arrays of a device{but}"


def outside(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that belongs to no job. What says how processes may be placed stays."""
    kept = {n: v for n, v in env.items() if not n.startswith(OF_JOBS) or n.startswith(("OMPI_MCA_", "OMPI_ALLOW_"))}
    of_users = {n: v for n, v in env.items() if n.startswith("PRTE_MCA_rmaps_default")}
    return {**kept, **of_users, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def main() -> int:
    """The try: messages and sums of device arrays between the processes of a small job, or of one with itself."""
    import cupy

    signal.alarm(int(SECONDS) + 5)  # who started it may be gone, and a library that hangs hears of nothing else
    mpi = load_mpi()
    cupy.cuda.Device(local_rank() % cupy.cuda.runtime.getDeviceCount()).use()
    comm, stream = mpi.COMM_WORLD, cupy.cuda.Stream(non_blocking=True)
    rank, size = comm.Get_rank(), comm.Get_size()
    pool = cupy.cuda.MemoryPool()

    def array(values: np.ndarray[Any, Any]) -> Any:
        with stream:
            made = cupy.ndarray(values.shape, values.dtype, pool.malloc(values.nbytes))
        if values.size:
            kind = cupy.cuda.runtime.memcpyHostToDevice
            cupy.cuda.runtime.memcpyAsync(made.data.ptr, values.ctypes.data, values.nbytes, kind, stream.ptr)
        stream.synchronize()
        return made

    def value(a: Any) -> np.ndarray[Any, Any]:
        held = np.empty(a.shape, a.dtype)
        kind = cupy.cuda.runtime.memcpyDeviceToHost
        cupy.cuda.runtime.memcpyAsync(held.ctypes.data, a.data.ptr, a.nbytes, kind, stream.ptr)
        stream.synchronize()
        return held

    for n in (7, 1 << 20):  # at once, and after a handshake
        mine, came = array(np.arange(n, dtype=np.float32) + rank), array(np.zeros(n, np.float32))
        requests = [comm.Irecv(came, (rank - 1) % size), comm.Isend(mine, (rank + 1) % size)]
        mpi.Request.Waitall(requests)
        assert (value(came) == np.arange(n) + (rank - 1) % size).all()
        comm.Allreduce(mpi.IN_PLACE, mine)
        assert (value(mine) == size * np.arange(n) + size * (size - 1) / 2).all()
    comm.Barrier()
    if rank == 0:
        print("moved", flush=True)
    total = array(np.ones(1 << 20, np.float32))
    comm.Iallreduce(mpi.IN_PLACE, total).Wait()
    assert (value(total) == size).all()
    comm.Barrier()
    if rank == 0:
        print("nonblocking", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
