"""`cupy.cuda.nccl` between virtual ranks: operations are tasks that start once the streams of all their members have come to them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import ml_dtypes
import numpy as np

from tests.util.fake_cupy.captures import Enter
from tests.util.fake_cupy.machine import machine
from tests.util.fake_cupy.runtime import _span
from tests.util.fake_cupy.streams import stream_at
from tests.util.queues import Task, pending

available = True
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = 0, 1, 2, 3, 4, 5
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = 6, 7, 8, 9
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = 0, 1, 2, 3, 4
_TYPES: dict[int, Any] = {
    0: np.int8, 1: np.uint8, 2: np.int32, 3: np.uint32, 4: np.int64, 5: np.uint64, 6: np.float16, 7: np.float32, 8: np.float64,
    9: ml_dtypes.bfloat16,
}  # fmt: skip
_local = threading.local()
_ids = 0


class NcclError(RuntimeError):
    """As CuPy's."""


def get_version() -> int:
    return 22703


def get_unique_id() -> bytes:
    global _ids
    _ids += 1
    return _ids.to_bytes(8, "little") + bytes(120)


class _World:
    """What members of one communicator have come to."""

    def __init__(self) -> None:
        self.ranks: dict[int, NcclCommunicator] = {}
        self.calls: dict[int, tuple[tuple[Any, ...], Task, dict[int, Any]]] = {}
        self.pairs: dict[tuple[int, int, int], tuple[Task, bool, dict[str, Any]]] = {}
        self.children: dict[tuple[int, int], _World] = {}
        self.splits: dict[int, int] = {}
        self.aborted = False
        self.last: dict[int, list[Task]] = {}  # what each rank was given last, in this or in any part of it


_worlds: dict[bytes, _World] = {}


class NcclConfig:
    """Options of a communicator."""

    def __init__(self, **options: Any) -> None:
        self.options = options


class NcclCommunicator:
    """One rank's handle. Where ranks are threads, making one waits for all members, as NCCL does; moves never block the host."""

    def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:
        machine().check()
        assert isinstance(commId, bytes) and len(commId) == 128
        world = _worlds.setdefault(commId, _World())
        self._join(world, ndev, rank, world.last)
        machine().scheduler.others(lambda: len(self._world.ranks) == ndev)

    def _join(self, world: _World, size: int | None, rank: int, last: dict[int, list[Task]]) -> NcclCommunicator:
        assert rank not in world.ranks, "one rank twice"
        self._world, self._ndev, self._key, self._last = world, size, rank, last
        self.graphs = WeakSet[Any]()
        self._order, self._splits, self._sequence = 0, 0, dict[tuple[int, int], int]()
        world.ranks[rank] = self
        return self

    @property
    def _size(self) -> int:
        return self._ndev or len(self._world.ranks)

    @property
    def _rank(self) -> int:
        """Of a split: the place among the keys of those that took the same color, all of whom must have come."""
        return sorted(self._world.ranks).index(self._key)

    def commSplit(self, color: int, key: int, config: Any = None) -> NcclCommunicator:
        """A part of the communicator; every member must call it, in the same order."""
        number, splits = self._splits, self._world.splits
        child = self._world.children.setdefault((number, color), _World())
        self._splits, splits[number] = number + 1, splits.get(number, 0) + 1
        made = NcclCommunicator.__new__(NcclCommunicator)._join(child, None, key, self._last)
        machine().scheduler.others(lambda: splits[number] == self._size)
        return made

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def check_async_error(self) -> None:
        if self._world.aborted:
            raise NcclError("NCCL_ERROR_REMOTE_ERROR")

    def abort(self) -> None:
        self._world.aborted = True

    def destroy(self) -> None:
        assert not self.graphs, "NCCL would hang: there are graphs with calls of the communicator"
        self._world.ranks.pop(self._key, None) if self._ndev else None

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        source, target = _array(sendbuf, count, datatype), _array(recvbuf, count, datatype)

        def work(members: dict[int, Any]) -> None:
            total = _reduced([m[0] for _, m in sorted(members.items())], op)
            for _, out in members.values():
                out[:] = total

        self._collective(("allReduce", count, datatype, op), (source, target), work, stream)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        source = _array(sendbuf, recvcount * self._size, datatype)
        target = _array(recvbuf, recvcount, datatype)

        def work(members: dict[int, Any]) -> None:
            total = _reduced([m[0] for _, m in sorted(members.items())], op)
            for place, (_, (_, out)) in enumerate(sorted(members.items())):
                out[:] = total[place * recvcount : (place + 1) * recvcount]

        self._collective(("reduceScatter", recvcount, datatype, op), (source, target), work, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        source, target = _array(sendbuf, count, datatype), _array(recvbuf, count * self._size, datatype)

        def work(members: dict[int, Any]) -> None:
            whole = np.concatenate([m[0] for _, m in sorted(members.items())])
            for _, out in members.values():
                out[:] = whole

        self._collective(("allGather", count, datatype), (source, target), work, stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        source, target = _array(sendbuff, count, datatype), _array(recvbuff, count, datatype)

        def work(members: dict[int, Any]) -> None:
            value = members[sorted(members)[root]][0].copy()
            for _, out in members.values():
                out[:] = value

        self._collective(("broadcast", count, datatype, root), (source, target), work, stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        source = _array(sendbuf, count, datatype)
        target = _array(recvbuf, count, datatype) if self._rank == root else None

        def work(members: dict[int, Any]) -> None:
            total = _reduced([m[0] for _, m in sorted(members.items())], op)
            members[sorted(members)[root]][1][:] = total

        self._collective(("reduce", count, datatype, op, root), (source, target), work, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._pair("send", (self._rank, peer), _array(sendbuf, count, datatype), stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._pair("recv", (peer, self._rank), _array(recvbuf, count, datatype), stream)

    def _collective(
        self, what: tuple[Any, ...], mine: Any, work: Callable[[dict[int, Any]], None], stream: int
    ) -> None:
        recorded = stream_at(stream).recording is not None

        def enter(after: list[Task]) -> list[Task]:
            self.check_async_error()
            order, called = self._order, (*what, recorded)
            self._order += 1
            if order not in self._world.calls:
                members: dict[int, Any] = {}
                task = machine().scheduler.add(lambda: work(members), [], self._size)
                self._world.calls[order] = called, task, members
            first, task, members = self._world.calls[order]
            assert first == called, f"NCCL would hang: operation {order} is {first} on one rank and {called} on another"
            members[self._key] = mine
            return self._entered([task], after)

        put = partial(_put, self, enter, stream)
        _local.queued.append(put) if _depth() else put()

    def _pair(self, end: str, pair: tuple[int, int], array: np.ndarray, stream: int) -> None:
        recorded = stream_at(stream).recording is not None

        def enter() -> Task:
            self.check_async_error()
            key = (*pair, self._sequence.get((*pair, end == "send"), 0))  # type: ignore[arg-type]
            self._sequence[*pair, end == "send"] = key[2] + 1  # type: ignore[index]
            if key not in self._world.pairs:
                ends: dict[str, Any] = {}

                def copy() -> None:
                    assert ends["send"].shape == ends["recv"].shape, f"NCCL would hang: {key} differ in length"
                    ends["recv"][:] = ends["send"]

                self._world.pairs[key] = machine().scheduler.add(copy, [], 2), recorded, ends
            task, other, ends = self._world.pairs[key]
            assert other is recorded, f"NCCL would hang: one end of {key} is in a graph"
            ends[end] = array
            return task

        if _depth():
            _local.pairs.append((self, enter, stream))
        else:
            _put(self, lambda after: self._entered([enter()], after), stream)

    def _entered(self, tasks: list[Task], after: list[Task]) -> list[Task]:
        """This rank has come to some operations, which start after its tasks; all earlier ones of its are among these, or before them."""
        waited, last = machine().scheduler._before(after), pending(self._last.get(self._key, []))
        assert all(t in waited for t in last), "NCCL might hang: calls of one rank side by side"
        self._last[self._key] = tasks
        for task in tasks:
            task.missing -= 1
            task.after += pending(after)
        return tasks


def _put(comm: NcclCommunicator, enter: Enter, stream: int) -> None:
    queue = stream_at(stream).queue
    if stream_at(stream).recording is not None:
        queue.enter(enter, comm)
        return
    for task in enter(pending([queue.tail()])):
        queue.wait(task)
    queue.put(lambda: None)


def _depth() -> int:
    return getattr(_local, "depth", 0)


def groupStart() -> None:
    if not _depth():
        _local.queued, _local.pairs = [], []
    _local.depth = _depth() + 1


def groupEnd() -> None:
    """Sends and receives of a group happen side by side."""
    _local.depth -= 1
    if _local.depth:
        return
    for put in _local.queued:
        put()
    by_stream: dict[int, list[Any]] = {}
    for comm, enter, stream in _local.pairs:
        by_stream.setdefault(stream, []).append((comm, enter))
    for stream, calls in by_stream.items():
        comm = calls[0][0]
        starts = [enter for _, enter in calls]
        _put(comm, lambda after, c=comm, starts=starts: c._entered([start() for start in starts], after), stream)


def _array(address: int, count: int, datatype: int) -> np.ndarray:
    dtype = np.dtype(_TYPES[datatype])
    if not count:
        return np.empty(0, dtype)
    _span(address, count * dtype.itemsize, "device")
    raw = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(raw, np.uint8).view(dtype)


def _reduced(parts: list[np.ndarray], op: int) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        if op == NCCL_SUM:
            total += part
        elif op == NCCL_MAX:
            np.fmax(total, part, out=total)  # of NaN NCCL promises nothing
        else:
            raise NotImplementedError(op)
    return total
