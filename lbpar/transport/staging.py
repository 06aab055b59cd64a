"""Moves of a device's arrays by a transport that moves arrays in host memory: out, along, and in again.

Long sums go in chunks: while one is under way between the ranks, the next is copied out, and the last one in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lbpar.engine.device import Array, Event
from lbpar.transport.calls import Call
from lbpar.transport.request import Request

Moves = Any
"""`lbpar.transport.base.Moves`, which makes these requests."""

CHUNK = 1 << 22
"""Most elements of a sum that go at once."""


class Staged(Request):
    """A move by way of the host: out when it starts, in when it is waited for."""

    def __init__(self, moves: Moves, call: Call, buf: Any, out: Any) -> None:
        super().__init__(moves.device, (buf, out), out)
        self._parts: list[tuple[Request, Any]]
        self._moves, self._call, self._buffers = moves, call, list[Any]()
        device, after = moves.device, moves.device.record()
        if call.kind == "exchange":
            others = {r: a for r, a in out.items() if r != moves.rank}
            sends = {r: self._out(a, after) for r, a in buf.items() if r != moves.rank}
            arrives: Any = {r: self._buffer(a) for r, a in others.items()}
            self._parts = [(moves._start(call, {r: wait() for r, wait in sends.items()}, arrives, None), others)]
        elif call.kind == "allreduce":
            members = len(moves.group(call.axes))
            chunk = (
                max(CHUNK // members, 1) * members
            )  # whose blocks are equal, so that bytes are counted as of one sum
            parts = [buf[i : i + chunk] for i in range(0, max(buf.size, 1), chunk)]
            copies = [self._out(part, after) for part in parts]
            self._parts = [(self._sum(part.size, wait), part) for part, wait in zip(parts, copies, strict=True)]
        else:
            if call.kind == "reduce_scatter":
                own = call.counts[moves.group(call.axes).index(moves.rank)]
                self._result = out = device.empty((own,), buf.dtype)
            host = self._out(buf, after)()
            arrives = None if call.kind == "reduce_scatter" else self._buffer(out)
            self._parts = [(moves._start(call, host, arrives, None), out)]

    def _buffer(self, a: Array) -> Any:
        self._buffers.append(self._device.buffer(a.size, a.dtype))
        return self._buffers[-1]

    def _out(self, a: Array, after: Event) -> Callable[[], Any]:
        """Start copying an array out; the call waits for that and gives it."""
        buffer = self._buffer(a)
        wait = self._device.copy_out(a, buffer, after)

        def arrived() -> Any:
            wait()
            return buffer

        return arrived

    def _sum(self, size: int, arrived: Callable[[], Any]) -> Request:
        host = arrived()
        return self._moves._start(replace(self._call, counts=(size,)), host, host, None)

    def test(self) -> bool:
        return self._waited or all(request.test() for request, _ in self._parts)

    def _finish(self) -> Event:
        device, event = self._device, None
        for request, to in self._parts:
            arrived = request.wait()
            pairs: list[tuple[Any, Any]] = (
                [(arrived[r], to[r]) for r in to] if isinstance(to, dict) else [(arrived, to)]
            )
            for host, array in pairs:
                if self._call.kind == "reduce_scatter":  # which gives memory of its own
                    self._buffer(array)[...] = host
                    host = self._buffers[-1]
                event = device.copy_in(host, array)
        for buffer in self._buffers:
            device.release(buffer, event)
        return event
