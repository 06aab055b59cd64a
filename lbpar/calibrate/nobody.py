"""A rank whose partners do not exist: what it computes can be run and timed without them."""

from __future__ import annotations

from typing import Any, NoReturn

from lbpar.engine.device import Event
from lbpar.layout.grid import Grid
from lbpar.transport.base import Counter, Transport
from lbpar.transport.calls import Call
from lbpar.transport.request import Done, Request


class Nobody(Transport):
    """Rank 0 of a grid, alone: everything that arrives is zero, at once.

    Parameters
    ----------
    grid : Grid
    """

    def __init__(self, grid: Grid) -> None:
        self.grid, self.rank, self.size = grid, 0, grid.size
        self.counter = Counter()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return obj

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        return [obj] * self.size

    def allgather_obj(self, obj: Any) -> list[Any]:
        return [obj] * self.size

    def barrier(self) -> None:
        return None

    def abort(self, message: str) -> NoReturn:
        raise SystemExit(message)

    def _start(self, call: Call, buf: Any, out: Any, after: Event) -> Request:
        if call.kind == "reduce_scatter":
            own = self.group(call.axes).index(self.rank)
            return Done(buf[: call.counts[own]])
        if call.kind != "allreduce":
            for array in out.values() if isinstance(out, dict) else (out,):
                array.fill(0)  # what memory held before may be numbers that processors are slow with
        return Done(out)
