"""A transport that asks the others first: finds ranks that would hang or mix up data.

Before each operation the members of its group compare what they are about to do. It costs two small
collectives each time; use it to look for a fault, not to train.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from lbpar.errors import CommError
from lbpar.layout.grid import Axes
from lbpar.transport.base import Array, Reduction, Request, Transport, check_counts, proper_axes
from lbpar.transport.calls import Call, array_call, check_same


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
        self.own_cores = inner.own_cores
        self._order: dict[Axes, int] = {}

    def allreduce(self, buf: Array, axes: Axes, op: Reduction = "sum", tag: str = "") -> Request:
        self._compare(array_call("allreduce", tag, self._proper(axes), buf.dtype, op, (buf.size,)))
        return self.inner.allreduce(buf, axes, op, tag)

    def allreduce_now(self, buf: Array, axes: Axes, op: Reduction = "sum", tag: str = "") -> Array:
        self._compare(array_call("allreduce_now", tag, self._proper(axes), buf.dtype, op, (buf.size,)))
        return self.inner.allreduce_now(buf, axes, op, tag)

    def reduce_scatter(
        self, buf: Array, counts: Sequence[int], axes: Axes, op: Reduction = "sum", tag: str = ""
    ) -> Request:
        self._compare(array_call("reduce_scatter", tag, self._proper(axes), buf.dtype, op, counts))
        return self.inner.reduce_scatter(buf, counts, axes, op, tag)

    def allgather(self, buf: Array, counts: Sequence[int], axes: Axes, tag: str = "") -> Request:
        self._compare(array_call("allgather", tag, self._proper(axes), buf.dtype, "", counts))
        return self.inner.allgather(buf, counts, axes, tag)

    def alltoall(
        self, buf: Array, send_counts: Sequence[int], recv_counts: Sequence[int], axes: Axes, tag: str = ""
    ) -> Request:
        group = self.group(axes)
        check_counts(send_counts, len(group), f"alltoall {tag!r}")
        check_counts(recv_counts, len(group), f"alltoall {tag!r}")
        send, recv = dict(zip(group, send_counts, strict=True)), dict(zip(group, recv_counts, strict=True))
        self._compare(array_call("alltoall", tag, self._proper(axes), buf.dtype, send=send, recv=recv))
        return self.inner.alltoall(buf, send_counts, recv_counts, axes, tag)

    def exchange(
        self, sends: Mapping[int, Array], recvs: Mapping[int, int], dtype: Any, axes: Axes, tag: str = ""
    ) -> Request:
        send = {r: b.size for r, b in sends.items()}
        self._compare(array_call("exchange", tag, self._proper(axes), dtype, send=send, recv=dict(recvs)))
        return self.inner.exchange(sends, recvs, dtype, axes, tag)

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

    def abort(self, message: str) -> NoReturn:
        self.inner.abort(message)

    def prepare(self, axes_sets: Iterable[Axes]) -> None:
        self.inner.prepare(axes_sets)

    def close(self) -> None:
        self.inner.close()

    def _proper(self, axes: Axes) -> Axes:
        return proper_axes(self.grid, axes)

    def _compare(self, call: Call) -> None:
        order = self._order.get(call.axes, 0)
        self._order[call.axes] = order + 1
        group = self.group(call.axes)
        if len(group) == 1:
            check_same({self.rank: call})
            return
        text = np.frombuffer(_to_json(order, call), np.uint8)
        with self.counter.paused():
            lengths = self._finish(
                self.inner.allgather(np.array([text.size]), [1] * len(group), call.axes, "check"), order, call, group
            )
            joined = self._finish(
                self.inner.allgather(text, lengths.tolist(), call.axes, "check"), order, call, group
            ).tobytes()
        ends = np.cumsum(lengths)
        said = {
            r: _from_json(joined[e - n : e], call.axes) for r, e, n in zip(group, ends, lengths.tolist(), strict=True)
        }
        where = f"checked transport: operation {order} over axes {call.axes}"
        if len({n for n, _ in said.values()}) > 1:
            numbers = {r: n for r, (n, _) in said.items()}
            raise CommError(f"{where}: ranks disagree on how many operations came before: {numbers}.")
        check_same({r: c for r, (_, c) in said.items()}, where)

    def _finish(self, request: Request, order: int, call: Call, group: tuple[int, ...]) -> Any:
        deadline = time.monotonic() + self.seconds
        while not request.test():
            if time.monotonic() > deadline:
                raise CommError(
                    f"checked transport: rank {self.rank} waited {self.seconds:g} s to start {call}, operation {order} "
                    f"of group {list(group)}; at least one of them does something else, or has ended."
                )
        return request.wait()


def _to_json(order: int, call: Call) -> bytes:
    facts = [order, call.kind, call.tag, call.dtype, call.op, call.counts, list(call.send.items())]
    return json.dumps([*facts, list(call.recv.items())]).encode()


def _from_json(text: bytes, axes: Axes) -> tuple[int, Call]:
    order, kind, tag, dtype, op, counts, send, recv = json.loads(text)
    return order, Call(kind, tag, axes, dtype, op, tuple(counts), dict(send), dict(recv))
