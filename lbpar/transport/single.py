"""One rank: every operation is done before it starts. Needs no MPI."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from lbpar.errors import CommError
from lbpar.layout.grid import Axes, Grid
from lbpar.transport.base import Array, Counter, Done, Reduction, Request, Transport, check_buffer, check_counts


class SingleTransport(Transport):
    """The transport of a job of one process.

    Parameters
    ----------
    grid : Grid, optional
        Must have one process.
    """

    def __init__(self, grid: Grid | None = None) -> None:
        self.grid = Grid() if grid is None else grid
        if self.grid.size != 1:
            raise CommError(f"single transport: the grid {self.grid} has {self.grid.size} processes, expected 1.")
        self.rank, self.size = 0, 1
        self.counter = Counter()

    def allreduce(self, buf: Array, axes: Axes, op: Reduction = "sum", tag: str = "") -> Request:
        check_buffer(buf, None, f"allreduce {tag!r}")
        return Done(buf)

    def reduce_scatter(
        self, buf: Array, counts: Sequence[int], axes: Axes, op: Reduction = "sum", tag: str = ""
    ) -> Request:
        check_counts(counts, 1, f"reduce_scatter {tag!r}")
        check_buffer(buf, counts[0], f"reduce_scatter {tag!r}")
        return Done(buf)

    def allgather(self, buf: Array, counts: Sequence[int], axes: Axes, tag: str = "") -> Request:
        check_counts(counts, 1, f"allgather {tag!r}")
        check_buffer(buf, counts[0], f"allgather {tag!r}")
        return Done(buf)

    def alltoall(
        self, buf: Array, send_counts: Sequence[int], recv_counts: Sequence[int], axes: Axes, tag: str = ""
    ) -> Request:
        what = f"alltoall {tag!r}"
        check_counts(send_counts, 1, what)
        check_counts(recv_counts, 1, what)
        check_buffer(buf, send_counts[0], what)
        if send_counts[0] != recv_counts[0]:
            raise CommError(f"{what}: rank 0 sends {send_counts[0]} elements to itself but expects {recv_counts[0]}.")
        return Done(buf)

    def exchange(
        self, sends: Mapping[int, Array], recvs: Mapping[int, int], dtype: Any, axes: Axes, tag: str = ""
    ) -> Request:
        return Done(copy_to_self(sends, recvs, dtype, 0, f"exchange {tag!r}"))

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return obj

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        return [obj]

    def allgather_obj(self, obj: Any) -> list[Any]:
        return [obj]

    def barrier(self) -> None:
        return None

    def abort(self, message: str) -> NoReturn:
        print(message, file=sys.stderr, flush=True)
        raise SystemExit(1)


def copy_to_self(
    sends: Mapping[int, Array], recvs: Mapping[int, int], dtype: Any, rank: int, what: str
) -> dict[int, Array]:
    """The result of an exchange in a group of one."""
    strange = sorted((set(sends) | set(recvs)) - {rank})
    if strange:
        raise CommError(f"{what}: rank {rank} names ranks {strange}, which are not in its group [{rank}].")
    own = sends.get(rank)
    if own is not None:
        check_buffer(own, None, what)
    have, want = (0 if own is None else own.size), recvs.get(rank, 0)
    if have != want:
        raise CommError(f"{what}: rank {rank} sends {have} elements to itself but expects {want}.")
    if rank not in recvs:
        return {}
    return {rank: np.empty(0, dtype) if own is None else own.copy()}
