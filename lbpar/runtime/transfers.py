"""Carry out one rank's part of a move: pack, start, wait, unpack."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from math import prod
from threading import Lock
from typing import Any

from lbpar.engine.base import Engine
from lbpar.layout.exchange import Exchange, exchange
from lbpar.layout.runs import box_size
from lbpar.layout.transition import Move
from lbpar.transport.base import Transport
from lbpar.transport.calls import pieces
from lbpar.transport.request import Request

Array = Any
Finish = Callable[[], Array]
ALIGNED = 64
"""Bytes of which the beginnings of pieces that are packed together are multiples."""


class Transfers:
    """Starts moves of one rank's arrays; each start returns what finishes it.

    Parameters
    ----------
    engine : Engine
        Packs and unpacks.
    transport : Transport
        Carries the bytes. Collective: every rank of the move's sub-communicator starts the same moves in the same order.

    Attributes
    ----------
    deferred : bool
        Make allreduces where they are waited for; default: where ranks have cores of their own on one node, which lose nothing by it.
        All ranks must then wait in the same order, too.
    """

    def __init__(self, engine: Engine, transport: Transport) -> None:
        self.engine, self.transport, self.rank = engine, transport, transport.rank
        if transport.device is not engine:
            transport.attach(engine)
        self.deferred = transport.own_cores
        self._under_way: deque[Request] = deque()
        self._sending: deque[Finish] = deque()
        self._lock = Lock()  # a request is waited for, or tested, by one thread at a time

    def advance(self) -> None:
        """Let the oldest moves under way progress: an MPI library does so only inside its calls. Any thread may call it."""
        if self._under_way and self._lock.acquire(blocking=False):
            try:
                while self._under_way and self._under_way[0].test():
                    self._under_way.popleft()
            finally:
                self._lock.release()

    def forget(self) -> None:
        """Drop what is known of moves under way; a step that was left early may have left some."""
        with self._lock:
            self._under_way.clear()
            self._sending.clear()

    def _watch(self, request: Request) -> Finish:
        """What waits for a request, while no other thread tests it."""
        self._under_way.append(request)

        def wait() -> Array:
            with self._lock:
                return request.wait()

        return wait

    def start(self, move: Move, array: Array, donate: bool, tag: str) -> Finish:
        """Start a move of ``array`` (this rank's block in ``move.src``); the result is its block in ``move.dst``.

        ``donate`` allows the array's memory to be overwritten.
        """
        return getattr(self, f"_{move.kind}")(move, array, donate, tag)

    def send(self, move: Move, array: Array, tag: str) -> None:
        """Start a move of which nothing comes to this rank; nobody waits for it before `settle`.

        Who receives may be far behind, and who sends must not wait for it.
        """
        assert move.kind == "p2p", move
        plan = exchange(move, self.rank)
        each = ALIGNED // array.dtype.itemsize or 1
        starts = list(accumulate((-(-p.size // each) * each for p in plan.sends), initial=0))
        flat = self.engine.empty((starts[-1],), array.dtype)
        sends = {p.peer: flat[at : at + p.size] for p, at in zip(plan.sends, starts, strict=False)}
        self.engine.pack_all(array, [(p.index, sends[p.peer]) for p in plan.sends])
        request = self.transport.exchange(sends, {}, array.dtype, move.axes, tag)
        self._sending.append(self._watch(request))

    def settle(self) -> None:
        """Wait for all that was sent."""
        while self._sending:
            self._sending.popleft()()

    def allreduce_many(self, move: Move, flat: Array, shapes: Sequence[tuple[int, ...]], tag: str) -> list[Finish]:
        """Allreduce several arrays that lie one after the other, over the axes of ``move``; a finish for each."""
        wait = self._sum(flat, move, tag)
        finishes: list[Finish] = []
        offset = 0
        for shape in shapes:
            part = slice(offset, offset + prod(shape))
            finishes.append(lambda part=part, shape=shape: wait()[part].reshape(shape))  # type: ignore[misc]
            offset = part.stop
        return finishes

    def _slice(self, move: Move, array: Array, donate: bool, tag: str) -> Finish:
        plan = exchange(move, self.rank)
        if plan.shape == array.shape:
            return lambda: array
        out = self._kept(plan, array)
        return lambda: out

    def _allreduce(self, move: Move, array: Array, donate: bool, tag: str) -> Finish:
        flat = self._flat(array) if donate else self.engine.copy(array).reshape(-1)
        wait = self._sum(flat, move, tag)
        return lambda: wait().reshape(array.shape)

    def _sum(self, flat: Array, move: Move, tag: str) -> Finish:
        if self.deferred:  # made where it is first waited for
            reduce = self.transport.allreduce
            return cache(lambda: reduce(flat, move.axes, move.src.reduce, tag, blocking=True).wait())
        return self._watch(self.transport.allreduce(flat, move.axes, move.src.reduce, tag))

    def _reduce_scatter(self, move: Move, array: Array, donate: bool, tag: str) -> Finish:
        plan = exchange(move, self.rank)
        flat, counts = self._packed(plan, array)
        wait = self._watch(self.transport.reduce_scatter(flat, counts, move.axes, move.src.reduce, tag))
        return lambda: wait().reshape(plan.shape)

    def _allgather(self, move: Move, array: Array, donate: bool, tag: str) -> Finish:
        plan = exchange(move, self.rank)
        counts = [box_size(move.src.box(m)) for m in plan.members]
        wait = self._watch(self.transport.allgather(self._flat(array), counts, move.axes, tag))
        return lambda: self._join(plan, array, wait(), counts)

    def _alltoall(self, move: Move, array: Array, donate: bool, tag: str) -> Finish:
        plan = exchange(move, self.rank)
        flat, sent = self._packed(plan, array, own=False)
        sizes = {p.peer: p.size for p in plan.recvs}
        counts = [sizes.get(m, 0) for m in plan.members]
        wait = self._watch(self.transport.alltoall(flat, sent, counts, move.axes, tag))
        return lambda: self._join(plan, array, wait(), counts)

    def _p2p(self, move: Move, array: Array, donate: bool, tag: str) -> Finish:
        plan = exchange(move, self.rank)
        sends = {p.peer: self.engine.pack(array, p.index).reshape(-1) for p in plan.sends}
        recvs = {p.peer: p.size for p in plan.recvs}
        wait = self._watch(self.transport.exchange(sends, recvs, array.dtype, move.axes, tag))
        add = move.kind == "accumulate"

        def finish() -> Array:
            out = self._kept(plan, array, add)
            arrived = wait()
            if add:  # what several ranks send for one element must not be added at the same time
                for p in plan.recvs:
                    self.engine.unpack(arrived[p.peer], out, p.index, accumulate=True)
            else:
                self.engine.unpack_all([(arrived[p.peer], p.index) for p in plan.recvs], out)
            return out

        return finish

    _halo = _p2p
    _accumulate = _p2p

    def _kept(self, plan: Exchange, array: Array, add: bool = False) -> Array:
        """A new destination array holding what stays on this rank; zero elsewhere, but for what arrivals will overwrite."""
        kept = 0
        if plan.keep is not None:
            src, dst = plan.keep
            # Straight from one array into the other: halos carry whole activations along.
            part = array[src] if all(isinstance(i, slice) for i in src) else self.engine.pack(array, src)
            kept = part.size
            if part.shape == plan.shape:
                return self.engine.pack(array, src)
        covered = kept + (0 if add else sum(p.size for p in plan.recvs))
        make = self.engine.zeros if covered < prod(plan.shape) else self.engine.empty
        out = make(plan.shape, array.dtype)
        if kept:
            self.engine.unpack(part, out, dst)
        return out

    def _packed(self, plan: Exchange, array: Array, own: bool = True) -> tuple[Array, list[int]]:
        """Pieces for all members in order, in one flat buffer, and their sizes."""
        index = {p.peer: (p.index, p.size) for p in plan.sends}
        if own and plan.keep is not None:
            index[self.rank] = plan.keep[0], prod(plan.shape)
        counts = [index[m][1] if m in index else 0 for m in plan.members]
        flat = self.engine.empty((sum(counts),), array.dtype)
        places = zip(plan.members, pieces(counts), strict=True)
        self.engine.pack_all(array, [(index[m][0], flat[at]) for m, at in places if at.stop > at.start])
        return flat, counts

    def _flat(self, array: Array) -> Array:
        """One-dimensional and contiguous: a view where that can be."""
        return (array if array.flags.c_contiguous else self.engine.copy(array)).reshape(-1)

    def _join(self, plan: Exchange, array: Array, arrived: Array, counts: list[int]) -> Array:
        """Unpack pieces that arrived in member order beside what this rank kept."""
        out = self._kept(plan, array)
        places = dict(zip(plan.members, pieces(counts), strict=True))
        self.engine.unpack_all([(arrived[places[p.peer]], p.index) for p in plan.recvs if p.peer != self.rank], out)
        return out
