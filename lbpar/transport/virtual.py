"""P ranks inside one process: tests of any grid without MPI.

Two ways to drive it:

* **Lockstep.** The caller holds all P transports and lets every rank start an operation before any rank waits for it.
  A ``wait`` that some member has not started yet raises CommError with the names of the missing ranks.
* **Threads.** ``world.run(function)`` runs ``function(transport)`` once per rank, one rank at a time; a rank that must
  wait hands over to the next. Ordinary blocking programs run unchanged, the order is always the same, and a
  deadlock is an error that names the ranks, not a hang.

Both check more than MPI does: members must agree on operation, tag, dtype, reduction and counts, and no one may touch
a buffer between start and wait. Sums are formed in rank order. Bytes are counted from the pieces copied between ranks,
not from a formula.
"""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NoReturn, TypeVar

import numpy as np

from lbpar.engine.device import Event
from lbpar.errors import CommError
from lbpar.layout.grid import Grid
from lbpar.layout.runs import block
from lbpar.transport.base import Counter, Transport, reduce_into
from lbpar.transport.calls import Call, check_same, pieces
from lbpar.transport.request import Request

T = TypeVar("T")


class VirtualWorld:
    """P ranks in one process.

    Parameters
    ----------
    grid : Grid
        The grid of the P ranks.
    strict : bool
        Keep a copy of every buffer from start to wait, and raise CommError if it was touched meanwhile.
    """

    def __init__(self, grid: Grid, strict: bool = True) -> None:
        self.grid = grid
        self.strict = strict
        self.transports = [VirtualTransport(self, r) for r in range(grid.size)]
        self._meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self._last: dict[int, Call] = {}
        self._threads: _RoundRobin | None = None

    def transport(self, rank: int) -> VirtualTransport:
        """The transport of one rank."""
        return self.transports[rank]

    def run(self, function: Callable[[VirtualTransport], T]) -> list[T]:
        """Run ``function(transport)`` for every rank, as a job of P processes would, and return the P results.

        Raises
        ------
        Exception
            The first exception that a rank raised by itself; if ranks only wait for each other, the
            CommError of the lowest of them.
        """
        self._threads = _RoundRobin(self.grid.size)
        try:
            return self._threads.run([lambda t=t: function(t) for t in self.transports])  # type: ignore[misc]
        finally:
            self._threads = None

    def check_idle(self) -> None:
        """Raise CommError if an operation was started but not finished by all members (a test's last line)."""
        if self._meetings:
            raise next(iter(self._meetings.values())).missing_error()

    def _meet(self, rank: int, call: Call, group: tuple[int, ...], place_in_order: int) -> _Meeting:
        key = (group, place_in_order)
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = _Meeting(self, key)
        self._last[rank] = call
        return meeting

    def _pass(self, piece: np.ndarray, source: int, target: int, call: Call, empty_too: bool = False) -> np.ndarray:
        """The one place where data passes from rank to rank, and where it is counted."""
        if source != target and (piece.size or empty_too):
            self.transports[source].counter.add(call.kind, call.tag, 1, piece.nbytes)
        return piece


class VirtualTransport(Transport):
    """One rank of a virtual world. Made by ``VirtualWorld``."""

    name = "virtual"

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self.world = world
        self.grid = world.grid
        self.rank, self.size = rank, world.grid.size
        self.counter = Counter()
        self._order: dict[tuple[int, ...], Iterator[int]] = defaultdict(count)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        found = self._collect("bcast", obj if self.rank == root else None, f"root {root}")
        return obj if self.rank == root else found[root]

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        found = self._collect("gather", obj, f"root {root}")
        return found if self.rank == root else None

    def allgather_obj(self, obj: Any) -> list[Any]:
        return self._collect("allgather_obj", obj)

    def barrier(self) -> None:
        self._collect("barrier", None)

    def _collect(self, kind: str, obj: Any, tag: str = "") -> list[Any]:
        """Copies of the objects of all ranks, in rank order."""
        found = self._post(Call(kind, tag, self.grid.axes), pickle.dumps(obj)).wait()
        return [pickle.loads(found[rank]) for rank in sorted(found)]

    def abort(self, message: str) -> NoReturn:
        raise CommError(f"rank {self.rank} aborted the job: {message}")

    def _start(self, call: Call, buf: Any, out: Any, after: Event) -> Request:
        return self._post(call, buf, out)

    def _post(self, call: Call, buf: Any, out: Any = None) -> _VirtualRequest:
        group = self.group(call.axes)
        meeting = self.world._meet(self.rank, call, group, next(self._order[group]))
        meeting.post(self.rank, call, buf, out)
        return _VirtualRequest(self, meeting, buf, out)


class _Meeting:
    """One operation of one group: what its members brought and what they take away."""

    def __init__(self, world: VirtualWorld, key: tuple[tuple[int, ...], int]) -> None:
        self.world, self.key, self.group = world, key, key[0]
        self.calls: dict[int, Call] = {}
        self.bufs: dict[int, Any] = {}
        self.outs: dict[int, Any] = {}
        self.copies: dict[int, list[np.ndarray]] = {}
        self.done = False
        self.taken: set[int] = set()

    def post(self, rank: int, call: Call, buf: Any, out: Any) -> None:
        self.calls[rank], self.bufs[rank] = call, buf
        # Sums appear in a buffer only when its rank waits for them, as with MPI at its worst.
        self.outs[rank] = (
            self.world.transports[rank].room.empty(buf.shape, buf.dtype) if call.kind == "allreduce" else out
        )
        if self.world.strict:
            self.copies[rank] = [b.copy() for b in _arrays(buf)]

    def ready(self) -> bool:
        """All members have come."""
        return len(self.calls) == len(self.group)

    def missing_error(self) -> CommError:
        call = next(iter(self.calls.values()))
        missing = [r for r in self.group if r not in self.calls]
        if not missing:
            late = [r for r in self.group if r not in self.taken]
            return CommError(f"{call}: ranks {late} started it but did not wait for it.")
        last = {r: self.world._last.get(r) for r in missing[:4]}
        doing = "; ".join(f"rank {r} last started {c if c else 'nothing'}" for r, c in last.items())
        return CommError(
            f"{call}, operation {self.key[1]} of group {list(self.group)}: ranks {sorted(self.calls)} wait for "
            f"ranks {missing}, which have not started it ({doing})."
        )

    def take(self, rank: int) -> Any:
        """The result of ``rank``; its buffers are overwritten only now."""
        call = self.calls[rank]
        if self.world.strict and any(
            a.tobytes() != b.tobytes() for a, b in zip(_arrays(self.bufs[rank]), self.copies.get(rank, ()), strict=True)
        ):
            raise CommError(f"{call}: rank {rank} changed a buffer between start and wait.")
        if not self.done:
            check_same(self.calls, f"operation {self.key[1]} of group {list(self.group)}")
            perform = getattr(self, f"_{call.kind}", None)  # control has all that it needs in `bufs`
            if perform is not None:
                perform(call)
            self.done = True
        self.taken.add(rank)
        if len(self.taken) == len(self.group):
            self.world._meetings.pop(self.key, None)
        if call.dtype is None:
            return self.bufs
        if call.kind == "allreduce":
            self.bufs[rank][:] = self.outs[rank]
            return self.bufs[rank]
        return self.outs[rank]

    def _allreduce(self, call: Call) -> None:
        # Direct reduce-scatter, then allgather. Empty blocks travel as well: the convention counts 2 (p - 1) messages.
        parts = (slice(*block(0, call.counts[0], len(self.group), i)) for i in range(len(self.group)))
        for owner, part in zip(self.group, parts, strict=True):
            total = self._reduced(call, part, owner, True)
            for target in self.group:
                self.outs[target][part] = self.world._pass(total, owner, target, call, True)

    def _reduce_scatter(self, call: Call) -> None:
        for target, part in zip(self.group, pieces(call.counts), strict=True):
            self.outs[target] = self._reduced(call, part, target)

    def _reduced(self, call: Call, part: slice, target: int, empty_too: bool = False) -> np.ndarray:
        """The sum (or maximum) of all members' parts in rank order, in a buffer of the target's."""
        total = self.world.transports[target].room.empty((part.stop - part.start,), call.dtype)
        for i, source in enumerate(self.group):
            piece = self.world._pass(self.bufs[source][part], source, target, call, empty_too)
            if i == 0:
                total[:] = piece
            else:
                reduce_into(total, piece, "sum" if call.op == "sum" else "max")
        return total

    def _allgather(self, call: Call) -> None:
        for source, part in zip(self.group, pieces(call.counts), strict=True):
            for target in self.group:
                self.outs[target][part] = self.world._pass(self.bufs[source], source, target, call)

    def _alltoall(self, call: Call) -> None:
        for target in self.group:
            for source, place in zip(self.group, pieces(list(self.calls[target].recv.values())), strict=True):
                own = dict(zip(self.group, pieces(list(self.calls[source].send.values())), strict=True))
                piece = self.bufs[source][own[target]]
                self.outs[target][place] = self.world._pass(piece, source, target, call)

    def _exchange(self, call: Call) -> None:
        for target in self.group:
            for source, out in self.outs[target].items():
                if out.size:
                    out[:] = self.world._pass(self.bufs[source][target], source, target, call)


class _VirtualRequest(Request):
    def __init__(self, transport: VirtualTransport, meeting: _Meeting, buf: Any, out: Any) -> None:
        super().__init__(transport.room, (buf, out), out)
        self._rank, self._meeting = transport.rank, meeting

    def _finish(self) -> Event:
        if not self._meeting.ready():
            threads = self._meeting.world._threads
            if threads is None or not threads.wait_until(self._rank, lambda: self._meeting.ready()):
                raise self._meeting.missing_error()
        self._result = self._meeting.take(self._rank)

    def test(self) -> bool:
        if not self._waited and not self._meeting.ready():
            threads = self._meeting.world._threads
            if threads is not None:
                threads.pass_on(self._rank)
        return self._waited or self._meeting.ready()


class _RoundRobin:
    """Threads of which exactly one runs: deterministic, and able to see a deadlock."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._conditions: dict[int, Callable[[], bool]] = {r: lambda: True for r in range(size)}
        self._go = [threading.Event() for _ in range(size)]
        self._all_done = threading.Event()
        self._stuck: set[int] = set()
        self._errors: list[tuple[bool, int, BaseException]] = []
        self._results: dict[int, Any] = {}

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        threads = [
            threading.Thread(target=self._body, args=(r, f), name=f"rank {r}", daemon=True)
            for r, f in enumerate(functions)
        ]
        for t in threads:
            t.start()
        self._go[0].set()
        self._all_done.wait()
        for t in threads:
            t.join()
        if self._errors:
            # An error of one's own comes before errors of ranks that waited for one that had failed.
            raise min(self._errors, key=lambda e: e[0])[2]
        return [self._results[r] for r in range(self._size)]

    def wait_until(self, rank: int, condition: Callable[[], bool]) -> bool:
        """Let the others run until ``condition()``; False if it can never become true."""
        self._conditions[rank] = condition
        self._switch(rank)
        return rank not in self._stuck

    def pass_on(self, rank: int) -> None:
        """Let the others run once."""
        self._conditions[rank] = lambda: True
        self._switch(rank)

    def _body(self, rank: int, function: Callable[[], Any]) -> None:
        self._sleep(rank)
        try:
            self._results[rank] = function()
        except BaseException as e:  # noqa: BLE001  it is raised again by ``run``
            self._errors.append((rank in self._stuck, rank, e))
        del self._conditions[rank]
        if self._conditions:
            self._wake(rank)
        else:
            self._all_done.set()

    def _switch(self, rank: int) -> None:
        self._wake(rank)
        self._sleep(rank)

    def _sleep(self, rank: int) -> None:
        self._go[rank].wait()
        self._go[rank].clear()

    def _wake(self, after: int) -> None:
        order = sorted(self._conditions, key=lambda r: (r - after - 1) % self._size)
        for r in order:
            if self._conditions[r]():
                self._go[r].set()
                return
        # Nobody can go on: the lowest rank learns it first, its exception is the one that is reported.
        lowest = min(self._conditions)
        self._stuck.add(lowest)
        self._go[lowest].set()


def _arrays(buf: Any) -> list[np.ndarray]:
    return [b for b in (buf.values() if isinstance(buf, Mapping) else [buf]) if isinstance(b, np.ndarray)]
