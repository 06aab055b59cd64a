"""A transport that asks the others first: finds ranks that would hang or mix up data.

Before each operation the members of its group compare what they are about to do. It costs two small
collectives each time; use it to look for a fault, not to train.
"""

from __future__ import annotations

import pickle
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, NoReturn

import numpy as np

from lbpar.engine.device import Device, Event
from lbpar.errors import CommError
from lbpar.layout.grid import Axes
from lbpar.transport.base import Transport
from lbpar.transport.calls import Call, check_same
from lbpar.transport.request import Request


class CheckedTransport(Transport):
    """Compare sequence number, operation, tag, dtype and counts over the group before each operation.

    Parameters
    ----------
    inner : Transport
        Carries the operations and the comparison. In a virtual world only ``world.run`` can drive it, since the
        comparison waits when an operation starts.
    seconds : float
        How long to wait for the others before CommError says what this rank was about to do.

    Raises
    ------
    CommError
        By every method, on all members that take part: the ranks that do something else, and what.
    """

    def __init__(self, inner: Transport, seconds: float = 60.0) -> None:
        self.inner = inner
        self.seconds = seconds
        self.rank, self.size, self.grid, self.counter = inner.rank, inner.size, inner.grid, inner.counter
        self._order: dict[Axes, Iterator[int]] = defaultdict(count)
        self.own_cores, self.device = inner.own_cores, inner.device

    def attach(self, device: Device) -> None:
        self.inner.attach(device)
        self.device, self.room, self.direct = device, self.inner.room, self.inner.direct

    def _start(self, call: Call, buf: Any, out: Any, after: Event) -> Request:
        self._compare(call)
        return self.inner._start(call, buf, out, after)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        self._compare(Call("bcast", f"root {root}", self._proper(self.grid.axes)))
        return self.inner.bcast(obj, root)

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        self._compare(Call("gather", f"root {root}", self._proper(self.grid.axes)))
        return self.inner.gather(obj, root)

    def allgather_obj(self, obj: Any) -> list[Any]:
        self._compare(Call("allgather_obj", "", self._proper(self.grid.axes)))
        return self.inner.allgather_obj(obj)

    def barrier(self) -> None:
        self._compare(Call("barrier", "", self._proper(self.grid.axes)))
        self.inner.barrier()

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return self.inner.waiting(what)

    def abort(self, message: str) -> NoReturn:
        self.inner.abort(message)

    def prepare(self, axes_sets: Iterable[Axes]) -> None:
        self.inner.prepare(axes_sets)

    def close(self) -> None:
        self.inner.close()

    def _compare(self, call: Call) -> None:
        order = next(self._order[call.axes])
        group = self.group(call.axes)
        if len(group) == 1:
            return
        text = np.frombuffer(pickle.dumps((order, call)), np.uint8)

        def gather(mine: np.ndarray, counts: list[int]) -> np.ndarray:
            request = self.inner.allgather(self.device.from_host(mine), counts, call.axes, "check")
            return self.device.to_host(self._await(request, order, call, group))

        with self.counter.paused():
            lengths = gather(np.array([text.size]), [1] * len(group))
            joined = gather(text, lengths.tolist()).tobytes()
        ends = np.cumsum(lengths)
        said = {r: pickle.loads(joined[e - n : e]) for r, e, n in zip(group, ends, lengths.tolist(), strict=True)}
        where = f"checked transport: operation {order} over axes {call.axes}"
        if len({n for n, _ in said.values()}) > 1:
            numbers = {r: n for r, (n, _) in said.items()}
            raise CommError(f"{where}: ranks disagree on how many operations came before: {numbers}.")
        check_same({r: c for r, (_, c) in said.items()}, where)

    def _await(self, request: Request, order: int, call: Call, group: tuple[int, ...]) -> Any:
        deadline = time.monotonic() + self.seconds
        while not request.test():
            if time.monotonic() > deadline:
                raise CommError(
                    f"checked transport: rank {self.rank} waited {self.seconds:g} s to start {call}, operation {order} "
                    f"of group {list(group)}; at least one of them does something else, or has ended."
                )
        return request.wait()
