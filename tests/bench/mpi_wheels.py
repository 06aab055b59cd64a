"""How fast is a small and a 64 KB allreduce with this MPI? Run it under each mpirun in turn; docs/mpi.md has the table.

    mpirun -n 2  python tests/bench/mpi_wheels.py
    mpirun -n 16 python tests/bench/mpi_wheels.py --seconds 2

Columns are microseconds per operation, the median of several rounds on the slowest rank: MPI's blocking call, its
non-blocking call with MPI's own wait, lbpar's transport with a wait that sleeps between looks, and the transport as it
comes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from lbpar.transport.mpi import MpiTransport, load_mpi, node_share

SIZES = {"8 B": 2, "64 KB": 16384}


def measure(comm: Any, operation: Callable[[], Any], seconds: float, rounds: int = 5) -> float:
    """Median seconds per operation over ``rounds`` rounds, each of the slowest rank."""
    results: list[float] = []
    repeat = 3
    for _ in range(rounds + 1):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(repeat):
            operation()
        results.append(max(comm.allgather((time.perf_counter() - start) / repeat)))
        # As a machine's other work changes, so does the time of a round; the next one is sized by the last.
        repeat = max(3, int(seconds / rounds / results[-1]))
    return median(results[1:])


def main() -> None:
    """Print one line of the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="per column (default 1)")
    seconds = parser.parse_args().seconds
    mpi = load_mpi()
    comm = mpi.COMM_WORLD
    vendor, numbers = mpi.get_vendor()
    version = f"{vendor} {'.'.join(map(str, numbers))}"
    transports = {
        "sleeping wait": MpiTransport(patient=True),
        "transport": MpiTransport(),
    }
    ranks, cores = node_share(comm)
    crowd = ranks / cores
    for label, n in SIZES.items():
        buf = np.zeros(n, np.float32)
        columns: dict[str, Callable[[], Any]] = {
            "blocking": lambda buf=buf: comm.Allreduce(mpi.IN_PLACE, buf),
            "non-blocking": lambda buf=buf: comm.Iallreduce(mpi.IN_PLACE, buf).Wait(),
        }
        for name, t in transports.items():
            columns[name] = lambda t=t, buf=buf: t.allreduce(buf, t.grid.axes).wait()
        times = {name: measure(comm, f, seconds) * 1e6 for name, f in columns.items()}
        if comm.rank == 0:
            cells = "  ".join(f"{name} {us:9.1f}" for name, us in times.items())
            ranks = f"{comm.size} ranks, {crowd:g} per core"
            print(f"{version:24} {ranks:24} {label:6} {cells}", flush=True)


if __name__ == "__main__":
    main()
