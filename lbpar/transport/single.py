"""One rank: every operation is done before it starts. Needs no MPI."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lbpar.engine.device import Device, Event
from lbpar.errors import CommError
from lbpar.layout.grid import Grid
from lbpar.transport.base import Counter, Transport
from lbpar.transport.calls import Call
from lbpar.transport.request import Request


class SingleTransport(Transport):
    """The transport of a job of one process, for arrays of any device.

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

    def attach(self, device: Device) -> None:
        self.device = device

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

    def _start(self, call: Call, buf: Any, out: Any, after: Event) -> Request:
        raise AssertionError(f"{call}: there is no other rank")
