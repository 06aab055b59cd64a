"""`cupy.cuda.nccl` between the processes of an MPI job: operations are tasks of their stream, and what they do is done by MPI.

As on a device, a call returns at once, and only who waits for the stream waits for the other ranks. A process runs what is queued before
its host waits for anything else, since a device would not wait for its host either.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from lbpar.transport.mpi import MpiTransport
from tests.util.fake_cupy import nccl
from tests.util.fake_cupy.machine import machine
from tests.util.fake_cupy.nccl import _array, _reduced
from tests.util.fake_cupy.streams import stream_at
from tests.util.queues import pending

for _name in ("available", "get_version", "NcclError", "NcclConfig", *(n for n in vars(nccl) if n.startswith("NCCL_"))):
    globals()[_name] = getattr(nccl, _name)

_group = threading.local()

ABORT = "STAND_IN_ABORT"
"""Environment variable: how aborts behave."""


def get_unique_id() -> bytes:
    return bytes(128)


def install(patch: Any) -> None:
    """Let hosts run what their devices hold before they wait for each other."""
    original = MpiTransport._blocking

    @contextmanager
    def blocking(self: MpiTransport, what: str, seconds: float | None = None) -> Iterator[None]:
        with original(self, what, seconds):
            if not what.startswith(("the GPU", "NCCL")):
                flush()
            yield

    patch.setattr(MpiTransport, "_blocking", blocking)


def flush() -> None:
    """Run all that is queued."""
    scheduler = machine().scheduler
    while scheduler.pending:
        scheduler.run_until(scheduler.pending[-1])
        scheduler.pending = pending(scheduler.pending)


class NcclCommunicator:
    """One rank's handle."""

    def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:
        machine().check()
        assert isinstance(commId, bytes) and len(commId) == 128
        assert (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank) == (ndev, rank), "a part of the job"
        self._comm = MPI.COMM_WORLD.Dup()

    def commSplit(self, color: int, key: int, config: Any = None) -> NcclCommunicator:
        made = NcclCommunicator.__new__(NcclCommunicator)
        flush()
        made._comm = self._comm.Split(color, key)
        return made

    def rank_id(self) -> int:
        return int(self._comm.rank)

    def size(self) -> int:
        return int(self._comm.size)

    def check_async_error(self) -> None:
        pass

    def abort(self) -> None:
        """Says so; with `ABORT` set to ``hangs`` it then waits for ever, as NCCL's may for ranks that are gone."""
        os.write(2, f"[rank {MPI.COMM_WORLD.rank} aborts a communicator of NCCL]\n".encode())
        while os.environ.get(ABORT) == "hangs":
            time.sleep(1)

    def destroy(self) -> None:
        pass

    def _gathered(self, array: np.ndarray) -> list[np.ndarray]:
        parts = np.empty((self.size(), array.nbytes), np.uint8)
        _patiently([self._comm.Iallgather(array.view(np.uint8), parts)])
        return [part.view(array.dtype) for part in parts]

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        source, target = _array(sendbuf, count, datatype), _array(recvbuf, count, datatype)
        _put(lambda: np.copyto(target, _reduced(self._gathered(source), op)), stream)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        source = _array(sendbuf, recvcount * self.size(), datatype)
        target, mine = _array(recvbuf, recvcount, datatype), slice(self.rank_id() * recvcount, None)
        _put(lambda: np.copyto(target, _reduced(self._gathered(source), op)[mine][:recvcount]), stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        source, target = _array(sendbuf, count, datatype), _array(recvbuf, count * self.size(), datatype)
        _put(lambda: np.copyto(target, np.concatenate(self._gathered(source))), stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        source, target = _array(sendbuff, count, datatype), _array(recvbuff, count, datatype)
        _put(lambda: np.copyto(target, self._gathered(source)[root]), stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        source, target = _array(sendbuf, count, datatype), _array(recvbuf, count, datatype)

        def work() -> None:
            total = _reduced(self._gathered(source), op)
            if self.rank_id() == root:
                target[:] = total

        _put(work, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        raw = _array(sendbuf, count, datatype).view(np.uint8)
        _message(lambda: self._comm.Isend(raw, peer), stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        raw = _array(recvbuf, count, datatype).view(np.uint8)
        _message(lambda: self._comm.Irecv(raw, peer), stream)


def _patiently(requests: list[MPI.Request]) -> None:
    """Wait for others who may need this core."""
    while not MPI.Request.Testall(requests):
        time.sleep(1e-4)


def _put(work: Callable[[], None], stream: int) -> None:
    if getattr(_group, "depth", 0):
        _group.calls.append((work, stream))
    else:
        stream_at(stream).queue.put(work)


def _message(start: Callable[[], Any], stream: int) -> None:
    if getattr(_group, "depth", 0):
        _group.messages.append((start, stream))
    else:
        stream_at(stream).queue.put(lambda: _patiently([start()]))


def groupStart() -> None:
    if not getattr(_group, "depth", 0):
        _group.depth, _group.calls, _group.messages = 0, [], []
    _group.depth += 1


def groupEnd() -> None:
    """Sends and receives of a group happen side by side."""
    _group.depth -= 1
    if _group.depth:
        return
    for work, stream in _group.calls:
        stream_at(stream).queue.put(work)
    for at in dict.fromkeys(stream for _, stream in _group.messages):
        starts = [start for start, stream in _group.messages if stream == at]
        stream_at(at).queue.put(lambda starts=starts: _patiently([start() for start in starts]))
