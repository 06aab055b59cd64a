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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from lbpar.errors import CommError
from lbpar.layout.grid import Axes, Grid
from lbpar.transport.base import (
    Array,
    Counter,
    Done,
    Reduction,
    Request,
    Transport,
    block_sizes,
    check_buffer,
    check_counts,
    proper_axes,
    reduce_into,
)
from lbpar.transport.calls import Call, array_call, check_same
from lbpar.transport.single import copy_to_self

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
        self._turns: _Turns | None = None

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
        self._turns = _Turns(self.grid.size)
        try:
            return self._turns.run([lambda t=t: function(t) for t in self.transports])  # type: ignore[misc]
        finally:
            self._turns = None

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

    def _copy(self, piece: np.ndarray, source: int, target: int, call: Call, empty_too: bool = False) -> np.ndarray:
        """The one place where data passes from rank to rank, and where it is counted."""
        if source != target and (piece.size or empty_too):
            self.transports[source].counter.add(call.kind, call.tag, 1, piece.nbytes)
        return piece.copy()


class VirtualTransport(Transport):
    """One rank of a virtual world. Made by ``VirtualWorld``."""

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self.world = world
        self.grid = world.grid
        self.rank, self.size = rank, world.grid.size
        self.counter = Counter()
        self._order: dict[tuple[int, ...], int] = {}

    def allreduce(self, buf: Array, axes: Axes, op: Reduction = "sum", tag: str = "") -> Request:
        check_buffer(buf, None, f"allreduce {tag!r}")
        axes = proper_axes(self.grid, axes)
        if not axes:
            return Done(buf)
        return self._post(array_call("allreduce", tag, axes, buf.dtype, op, (buf.size,)), [buf])

    def reduce_scatter(
        self, buf: Array, counts: Sequence[int], axes: Axes, op: Reduction = "sum", tag: str = ""
    ) -> Request:
        axes = proper_axes(self.grid, axes)
        check_counts(counts, self.grid.ways(axes), f"reduce_scatter {tag!r}")
        check_buffer(buf, sum(counts), f"reduce_scatter {tag!r}")
        if not axes:
            return Done(buf)
        return self._post(array_call("reduce_scatter", tag, axes, buf.dtype, op, counts), [buf])

    def allgather(self, buf: Array, counts: Sequence[int], axes: Axes, tag: str = "") -> Request:
        axes = proper_axes(self.grid, axes)
        place = self.group(axes).index(self.rank)
        check_counts(counts, self.grid.ways(axes), f"allgather {tag!r}")
        check_buffer(buf, counts[place], f"allgather {tag!r}")
        if not axes:
            return Done(buf)
        return self._post(array_call("allgather", tag, axes, buf.dtype, "", counts), [buf])

    def alltoall(
        self, buf: Array, send_counts: Sequence[int], recv_counts: Sequence[int], axes: Axes, tag: str = ""
    ) -> Request:
        axes = proper_axes(self.grid, axes)
        group = self.group(axes)
        check_counts(send_counts, len(group), f"alltoall {tag!r}")
        check_counts(recv_counts, len(group), f"alltoall {tag!r}")
        check_buffer(buf, sum(send_counts), f"alltoall {tag!r}")
        send, recv = dict(zip(group, send_counts, strict=True)), dict(zip(group, recv_counts, strict=True))
        call = array_call("alltoall", tag, axes, buf.dtype, send=send, recv=recv)
        if not axes:
            check_same({self.rank: call})
            return Done(buf)
        return self._post(call, [buf])

    def exchange(
        self, sends: Mapping[int, Array], recvs: Mapping[int, int], dtype: Any, axes: Axes, tag: str = ""
    ) -> Request:
        axes = proper_axes(self.grid, axes)
        what = f"exchange {tag!r}"
        if not axes:
            return Done(copy_to_self(sends, recvs, dtype, self.rank, what))
        for r, buf in sends.items():
            check_buffer(buf, None, what)
            if buf.dtype != np.dtype(dtype):
                raise CommError(f"{what}: rank {self.rank} sends {buf.dtype} to rank {r}, expected {np.dtype(dtype)}.")
        send = {r: b.size for r, b in sends.items()}
        call = array_call("exchange", tag, axes, dtype, send=send, recv=dict(recvs))
        return self._post(call, sends, tuple(recvs))

    def bcast(self, obj: Any, root: int = 0) -> Any:
        request = self._post(Call("bcast", f"root {root}", self.grid.axes), [_pack(obj if self.rank == root else None)])
        if self.rank == root:
            request.leave()
            return obj
        return pickle.loads(request.wait()[root])

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        request = self._post(Call("gather", f"root {root}", self.grid.axes), [_pack(obj)])
        if self.rank != root:
            request.leave()
            return None
        return [pickle.loads(b) for b in request.wait()]

    def allgather_obj(self, obj: Any) -> list[Any]:
        return [pickle.loads(b) for b in self._post(Call("allgather_obj", "", self.grid.axes), [_pack(obj)]).wait()]

    def barrier(self) -> None:
        self._post(Call("barrier", "", self.grid.axes), [b""]).wait()

    def abort(self, message: str) -> NoReturn:
        raise CommError(f"rank {self.rank} aborted the job: {message}")

    def _post(self, call: Call, bufs: Any, wanted: Sequence[int] = ()) -> _VirtualRequest:
        group = self.group(call.axes)
        order = self._order.get(group, 0)
        self._order[group] = order + 1
        meeting = self.world._meet(self.rank, call, group, order)
        meeting.post(self.rank, call, bufs, wanted)
        return _VirtualRequest(self.rank, meeting)


class _Meeting:
    """One operation of one group: what its members brought and what they take away."""

    def __init__(self, world: VirtualWorld, key: tuple[tuple[int, ...], int]) -> None:
        self.world, self.key, self.group = world, key, key[0]
        self.calls: dict[int, Call] = {}
        self.bufs: dict[int, Any] = {}
        self.wanted: dict[int, Sequence[int]] = {}
        self.copies: dict[int, list[np.ndarray]] = {}
        self.results: dict[int, Any] | None = None
        self.taken: set[int] = set()

    def post(self, rank: int, call: Call, bufs: Any, wanted: Sequence[int]) -> None:
        self.calls[rank], self.bufs[rank], self.wanted[rank] = call, bufs, wanted
        if self.world.strict:
            self.copies[rank] = [b.copy() for b in _arrays(bufs)]

    def ready(self, rank: int) -> bool:
        """Everyone ``rank`` needs has come. A broadcast needs only its root."""
        call = self.calls[rank]
        if call.kind == "bcast":
            return int(call.tag.split()[1]) in self.calls or len(self.calls) == len(self.group)
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
        if self.world.strict and any(
            a.tobytes() != b.tobytes() for a, b in zip(_arrays(self.bufs[rank]), self.copies.get(rank, ()), strict=True)
        ):
            raise CommError(f"{self.calls[rank]}: rank {rank} changed a buffer between start and wait.")
        if len(self.calls) < len(self.group):  # a broadcast whose root has come
            self.leave(rank)
            return {r: b[0] for r, b in self.bufs.items()}
        if self.results is None:
            check_same(self.calls, f"operation {self.key[1]} of group {list(self.group)}")
            self.results = self._perform(self.calls[rank])
        self.leave(rank)
        result = self.results[rank]
        if self.calls[rank].kind == "allreduce":
            self.bufs[rank][0][:] = result
            return self.bufs[rank][0]
        return result

    def leave(self, rank: int) -> None:
        """``rank`` needs nothing more of this operation."""
        self.taken.add(rank)
        if len(self.taken) == len(self.group):
            self.world._meetings.pop(self.key, None)

    def _perform(self, call: Call) -> dict[int, Any]:
        if call.kind == "allreduce":
            return self._allreduce(call)
        if call.kind == "reduce_scatter":
            return self._reduce_scatter(call, call.counts, False)
        if call.kind == "allgather":
            parts = {r: self.bufs[r][0] for r in self.group}
            return {t: np.concatenate([self._copy(parts[s], s, t, call) for s in self.group]) for t in self.group}
        if call.kind == "alltoall":
            return self._alltoall(call)
        if call.kind == "exchange":
            return self._exchange(call)
        everything = {r: self.bufs[r][0] for r in self.group}
        if call.kind == "bcast":
            return {r: everything for r in self.group}
        return {r: list(everything.values()) for r in self.group}

    def _copy(self, piece: np.ndarray, source: int, target: int, call: Call, empty_too: bool = False) -> np.ndarray:
        return self.world._copy(piece, source, target, call, empty_too)

    def _allreduce(self, call: Call) -> dict[int, Any]:
        # Direct reduce-scatter, then allgather. Empty blocks travel as well: the convention counts 2 (p - 1) messages.
        blocks = self._reduce_scatter(call, block_sizes(call.counts[0], len(self.group)), True)
        return {
            t: np.concatenate([self._copy(blocks[s], s, t, call, empty_too=True) for s in self.group])
            for t in self.group
        }

    def _reduce_scatter(self, call: Call, counts: Sequence[int], empty_too: bool) -> dict[int, Any]:
        out, start = {}, 0
        for target, n in zip(self.group, counts, strict=True):
            total = None
            for source in self.group:
                part = self._copy(self.bufs[source][0][start : start + n], source, target, call, empty_too)
                if total is None:
                    total = part
                else:
                    reduce_into(total, part, "sum" if call.op == "sum" else "max")
            out[target] = total
            start += n
        return out

    def _alltoall(self, call: Call) -> dict[int, Any]:
        pieces: dict[int, list[np.ndarray]] = {t: [] for t in self.group}
        for source in self.group:
            start = 0
            for target in self.group:
                n = self.calls[source].send.get(target, 0)
                pieces[target].append(self._copy(self.bufs[source][0][start : start + n], source, target, call))
                start += n
        return {t: np.concatenate(p) for t, p in pieces.items()}

    def _exchange(self, call: Call) -> dict[int, Any]:
        out: dict[int, Any] = {}
        for target in self.group:
            out[target] = {}
            for source in self.wanted[target]:
                piece = self.bufs[source].get(target) if source in self.bufs else None
                if piece is None:
                    piece = np.empty(0, call.dtype)
                out[target][source] = self._copy(piece, source, target, call)
        return out


class _VirtualRequest(Request):
    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self._rank, self._meeting = rank, meeting
        self._result: Any = None
        self._finished = False

    def wait(self) -> Any:
        if not self._finished:
            if not self._meeting.ready(self._rank):
                turns = self._meeting.world._turns
                if turns is None or not turns.wait_until(self._rank, lambda: self._meeting.ready(self._rank)):
                    raise self._meeting.missing_error()
            self._result = self._meeting.take(self._rank)
            self._finished = True
        return self._result

    def leave(self) -> None:
        """This rank takes no result."""
        self._meeting.leave(self._rank)

    def test(self) -> bool:
        if not self._finished and not self._meeting.ready(self._rank):
            turns = self._meeting.world._turns
            if turns is not None:
                turns.pass_on(self._rank)
        return self._finished or self._meeting.ready(self._rank)


class _Turns:
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


def _arrays(bufs: Any) -> list[np.ndarray]:
    return [b for b in (bufs.values() if isinstance(bufs, Mapping) else bufs) if isinstance(b, np.ndarray)]


def _pack(obj: Any) -> bytes:
    return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
