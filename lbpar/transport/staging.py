"""Moves of a device's arrays by a transport that moves arrays in host memory: out, along, and in again.

Long moves go in parts: while one is under way between the ranks, the next is copied out, and the last one in. All members cut a sum, a
reduce-scatter or an allgather into as many parts, since they know the same counts. Of an exchange or all-to-all each pair of ranks knows its
own messages alone, which both cut alike; members then have different numbers of parts, which not every transport takes
(`Moves.parts_differ`). What arrives is the same as of a whole move, and so is a reduce-scatter to the last bit (`LEAST`); a long allreduce
may be added up in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lbpar.engine.device import Array, Event
from lbpar.layout.runs import block
from lbpar.transport.calls import Call, pieces
from lbpar.transport.request import Request

Moves = Any
"""`lbpar.transport.base.Moves`, which makes these requests."""

CHUNK = 1 << 22
"""Most elements that go at once, of all members together."""

LEAST = 1 << 15
"""Elements of a member for which a part is not made smaller: 128 KB of float32. Parts are cut evenly, so that half of it is in each: in half
types as much as `lbpar.transport.mpi.PAIRWISE`, from which on MPI's reduce-scatter sums in one order whatever the length."""


@dataclass
class _Part:
    """What goes at once: pieces of the device's arrays, in the order in which they lie in memory of the host; of an exchange, by rank."""

    call: Call
    gives: dict[int, Array]
    gets: dict[int, Array]


class Staged(Request):
    """A move by way of the host: out when it starts, in when it is waited for."""

    def __init__(self, moves: Moves, call: Call, buf: Any, out: Any) -> None:
        device, after = moves.device, moves.device.record()
        if call.kind == "reduce_scatter":
            out = device.empty((call.counts[moves.group(call.axes).index(moves.rank)],), buf.dtype)
        super().__init__(device, (buf, out), out)
        assert call.dtype is not None
        self._moves, self._dtype, self._buffers = moves, call.dtype, list[Any]()
        parts = list(_parts(moves, call, buf, out))
        copies = [self._copied_out(part.gives.values(), after) for part in parts]
        self._parts = [(self._begin(part, host()), part) for part, host in zip(parts, copies, strict=True)]

    def _copied_out(self, gives: Iterable[Array], after: Event) -> Callable[[], Any]:
        """Start copying arrays out; the call waits for that and gives the memory in which they lie."""
        buffer = self._buffer(gives)
        waits = [self._device.copy_out(a, to, after) for a, to in zip(gives, _apart(buffer, gives), strict=True)]

        def arrived() -> Any:
            for wait in waits:
                wait()
            return buffer

        return arrived

    def _buffer(self, arrays: Iterable[Array]) -> Any:
        """Memory of the host for arrays, one behind the other."""
        self._buffers.append(self._device.buffer(sum(a.size for a in arrays), self._dtype))
        return self._buffers[-1]

    def _begin(self, part: _Part, host: Any) -> Request:
        """Start the move of what has been copied out."""
        kind, to = part.call.kind, host
        if kind == "reduce_scatter":
            to = None
        elif kind != "allreduce":
            to = self._buffer(part.gets.values())
        if kind == "exchange":
            host, to = _by_rank(host, part.gives), _by_rank(to, part.gets)
        request: Request = self._moves._start(part.call, host, to, None)
        return request

    def test(self) -> bool:
        return self._waited or all(request.test() for request, _ in self._parts)

    def _finish(self) -> Event:
        device, event = self._device, None
        for request, part in self._parts:
            arrived = request.wait()
            if part.call.kind == "reduce_scatter":  # which gives memory of its own
                pinned = self._buffer(part.gets.values())
                pinned[...] = arrived
                arrived = pinned
            if part.call.kind != "exchange":
                arrived = _by_rank(arrived, part.gets)
            for rank, array in part.gets.items():
                event = device.copy_in(arrived[rank], array)
        for buffer in self._buffers:
            device.release(buffer, event)
        return event


def _apart(host: Any, arrays: Iterable[Array]) -> list[Any]:
    """The piece of each array in memory where they lie one behind the other."""
    return [host[place] for place in pieces([a.size for a in arrays])]


def _by_rank(host: Any, arrays: dict[int, Array]) -> dict[int, Any]:
    return dict(zip(arrays, _apart(host, arrays.values()), strict=True))


def _parts(moves: Moves, call: Call, buf: Any, out: Any) -> Iterator[_Part]:
    """A move in parts, of which there is one at least."""
    me, group = moves.rank, moves.group(call.axes)
    members = len(group)
    each = max(CHUNK // members, LEAST)
    match call.kind:
        case "allreduce":
            # Blocks of a part are equal, so that bytes are counted as of one sum.
            chunk = max(CHUNK // members, 1) * members
            for i in range(0, max(buf.size, 1), chunk):
                part = {me: buf[i : i + chunk]}
                yield _Part(replace(call, counts=(part[me].size,)), part, part)
        case "reduce_scatter" | "allgather":
            summed = call.kind == "reduce_scatter"
            rounds = -(-sum(call.counts) // (each * members))
            if rounds <= 1:
                yield _Part(call, {me: buf}, {me: out})
                return
            whole, own = (buf, out) if summed else (out, buf)
            for k in range(rounds):
                cuts = {r: block(0, n, rounds, k) for r, n in zip(group, call.counts, strict=True)}
                places = zip(group, pieces(call.counts), strict=True)
                spread = {r: whole[place][slice(*cuts[r])] for r, place in places}
                mine = {me: own[slice(*cuts[me])]}
                counts = tuple(b - a for a, b in cuts.values())
                yield _Part(replace(call, counts=counts), *((spread, mine) if summed else (mine, spread)))
        case _:
            exchange = call.kind == "exchange"
            if exchange:  # the piece for oneself is there already
                gives, gets = ({r: a for r, a in arrays.items() if r != me} for arrays in (buf, out))
            else:
                gives, gets = (
                    {r: whole[place] for r, place in zip(sizes, pieces(list(sizes.values())), strict=True)}
                    for whole, sizes in ((buf, call.send), (out, call.recv))
                )
            longest = max((a.size for a in (*gives.values(), *gets.values())), default=0)
            if longest <= each or not moves.parts_differ:
                yield _Part(call, gives, gets) if exchange else _Part(call, {me: buf}, {me: out})
                return
            for k in range(-(-longest // each)):
                some, come = ({r: a[k * each : (k + 1) * each] for r, a in arrays.items()} for arrays in (gives, gets))
                send, recv = ({r: a.size for r, a in arrays.items()} for arrays in (some, come))
                yield _Part(replace(call, part=k, send=send, recv=recv), some, come)
