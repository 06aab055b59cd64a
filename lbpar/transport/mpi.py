"""Ranks are MPI processes; arrays are in host memory.

Every operation is non-blocking. Sub-communicators are made once per set of axes with ``Create_group``, which only the
members take part in, so that groups whose turn has not come cannot hold up the others. All of them, and the world
communicator itself, are private duplicates: nothing here can meet a message of the user's own.

No single MPI call carries more than ``limit`` elements, because most MPI libraries count in 32-bit integers. Above it:

    allreduce        consecutive chunks
    reduce_scatter   messages between all pairs, summed on arrival; where short, a chunked reduction to each member, in place
    allgather        a chunked broadcast from each member
    alltoall, exchange   chunked messages

A wait is MPI's own. Only where more ranks than cores share a node (with MPICH: many more), a wait looks a few times and then
sleeps between looks: a rank that spins keeps the core from the one it waits for, and one that yields still looks busy.

``alltoall`` always consists of single messages: its counts differ between members, so a member cannot know whether
another one's total is above the limit, and all must take the same path. Empty pieces then cost nothing either.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from lbpar.errors import CommError, Unsupported
from lbpar.layout.grid import Axes, Grid
from lbpar.transport.base import (
    Array,
    Counter,
    Done,
    Reduction,
    Request,
    Transport,
    check_buffer,
    check_counts,
    proper_axes,
    reduce_into,
    sent_allgather,
    sent_allreduce,
    sent_exchange,
    sent_pieces,
)
from lbpar.transport.single import copy_to_self
from lbpar.transport.watch import Watch

LIMIT = 2**31 - 1
"""Most elements in one MPI call."""

SUM_CHUNK = 1 << 20
"""Most elements in one call of a long allreduce: its pieces then overlap. 44 MB of float32 took half the time on two ranks and two
thirds on four (Open MPI 5, shared memory), against one call."""

PAIRWISE = 1 << 15
"""Bytes per member from which on a reduce-scatter is messages between all pairs and sums by the receivers: the same bytes, and several
times as fast as MPI's (16 MB a member, two ranks: 4 instead of 17 ms)."""

TAGS = 32768
"""MPI guarantees message tags 0 ... 32767."""

LOOKS = 20
"""Looks at a request before a patient wait begins to sleep."""

NAP = 1e-4
"""Seconds of sleep between looks of a patient wait."""

CROWD = 8
"""Ranks per core from which on a wait that sleeps beats MPICH's own, measured on 2 cores (docs/mpi.md)."""

_DTYPES = frozenset("?bBhHiIlLqQfdFD")


class MpiTransport(Transport):
    """The transport of one MPI process. Making one is collective over ``comm``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The ranks of the grid, in its order; default ``MPI.COMM_WORLD``. It is duplicated and stays the caller's own.
    grid : Grid, optional
        Default ``Grid.of(comm.size)``.
    limit : int
        Most elements in one MPI call. Tests make it tiny.
    watch : Watch, optional
        Told about every operation, to find a job that hangs.
    patient : bool, optional
        Sleep while waiting; default: on nodes with more ranks than cores (Open MPI), or ``CROWD`` times as many.

    Raises
    ------
    CommError
        The grid does not have as many processes as ``comm``, or MPI has been finalized.
    """

    def __init__(
        self,
        comm: Any = None,
        grid: Grid | None = None,
        *,
        limit: int = LIMIT,
        watch: Watch | None = None,
        patient: bool | None = None,
    ) -> None:
        self._mpi = load_mpi()
        comm = self._mpi.COMM_WORLD if comm is None else comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.grid = Grid.of(self.size) if grid is None else grid
        if self.grid.size != self.size:
            raise CommError(
                f"MPI transport: the grid {self.grid} has {self.grid.size} processes, but the job has {self.size} "
                f"ranks. Start {self.grid.size} ranks, or use a plan made for {self.size}."
            )
        if limit < 1:
            raise CommError(f"MPI transport: limit {limit} must be at least 1.")
        self.counter = Counter()
        self._limit = limit
        self._watch = watch
        with self._busy("all ranks to connect"):
            self._comm = comm.Dup()
            self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)  # an error becomes an exception, not the end
            ranks, cores = node_share(self._comm)
        crowd = ranks / cores
        self.own_cores = ranks == self.size and crowd <= 1
        if patient is None:
            patient = crowd > 1 if self._mpi.get_vendor()[0] == "Open MPI" else crowd >= CROWD
        self._patient = patient
        self._comms: dict[Axes, Any] = {}
        self._order: dict[Axes, int] = {}
        self._closed = False

    def prepare(self, axes_sets: Iterable[Axes]) -> None:
        for axes in axes_sets:
            self._group_comm(proper_axes(self.grid, axes))

    def allreduce(self, buf: Array, axes: Axes, op: Reduction = "sum", tag: str = "") -> Request:
        what = f"allreduce {tag!r}"
        comm = self._summing(buf, axes, tag, what)
        if comm is None:
            return Done(buf)
        with self._errors(what):
            requests = [comm.Iallreduce(self._mpi.IN_PLACE, part, self._op(op)) for part in self._long(buf)]
        return _MpiRequest(self, what, requests, buf)

    def allreduce_now(self, buf: Array, axes: Axes, op: Reduction = "sum", tag: str = "") -> Array:
        if self._patient:
            return super().allreduce_now(buf, axes, op, tag)
        what = f"allreduce {tag!r}"
        comm = self._summing(buf, axes, tag, what)
        if comm is not None:
            with self._busy(what):
                for part in self._long(buf):
                    comm.Allreduce(self._mpi.IN_PLACE, part, self._op(op))
        return buf

    def _summing(self, buf: Array, axes: Axes, tag: str, what: str) -> Any:
        """The communicator of an allreduce that is checked and counted; None for a group of one."""
        check_buffer(buf, None, what)
        axes = proper_axes(self.grid, axes)
        if not axes:
            return None
        self._check_dtype(buf.dtype, what)
        comm, group = self._group_comm(axes), self.group(axes)
        self._count("allreduce", tag, buf, sent_allreduce(buf.size, group.index(self.rank), len(group)))
        return comm

    def _long(self, buf: Array) -> list[np.ndarray]:
        return _chunks(buf, min(self._limit, SUM_CHUNK))

    def reduce_scatter(
        self, buf: Array, counts: Sequence[int], axes: Axes, op: Reduction = "sum", tag: str = ""
    ) -> Request:
        what = f"reduce_scatter {tag!r}"
        axes = proper_axes(self.grid, axes)
        check_counts(counts, self.grid.ways(axes), what)
        check_buffer(buf, sum(counts), what)
        if not axes:
            return Done(buf)
        self._check_dtype(buf.dtype, what)
        comm, place = self._group_comm(axes), self.group(axes).index(self.rank)
        self._count("reduce_scatter", tag, buf, sent_pieces(counts, place))
        pieces = _pieces(buf, counts)
        if buf.nbytes >= PAIRWISE * len(counts):
            result = pieces[place]
            arrived = [np.empty(0 if i == place else result.size, buf.dtype) for i in range(len(counts))]
            requests = self._messages(axes, what, pieces, arrived, place)

            def add() -> None:
                for i, part in enumerate(arrived):
                    if i != place:
                        reduce_into(result, part, op)

            return _MpiRequest(self, what, requests, result, keep=buf, then=add)
        with self._errors(what):
            if buf.size <= self._limit:
                result = np.empty(counts[place], buf.dtype)
                requests = [comm.Ireduce_scatter(buf, result, list(counts), self._op(op))] if buf.size else []
                return _MpiRequest(self, what, requests, result, keep=buf)
            requests = []
            for root, piece in enumerate(pieces):
                for part in _chunks(piece, self._limit):
                    send, recv = (self._mpi.IN_PLACE, part) if root == place else (part, None)
                    requests.append(comm.Ireduce(send, recv, self._op(op), root))
        return _MpiRequest(self, what, requests, pieces[place])

    def allgather(self, buf: Array, counts: Sequence[int], axes: Axes, tag: str = "") -> Request:
        what = f"allgather {tag!r}"
        axes = proper_axes(self.grid, axes)
        group = self.group(axes)
        place = group.index(self.rank)
        check_counts(counts, len(group), what)
        check_buffer(buf, counts[place], what)
        if not axes:
            return Done(buf)
        self._check_dtype(buf.dtype, what)
        comm = self._group_comm(axes)
        self._count("allgather", tag, buf, sent_allgather(counts[place], len(group)))
        result = np.empty(sum(counts), buf.dtype)
        with self._errors(what):
            if result.size <= self._limit:
                requests = [comm.Iallgatherv(buf, [result, list(counts)])] if result.size else []
                return _MpiRequest(self, what, requests, result, keep=buf)
            pieces = _pieces(result, counts)
            pieces[place][:] = buf
            requests = [
                comm.Ibcast(part, root) for root, piece in enumerate(pieces) for part in _chunks(piece, self._limit)
            ]
        return _MpiRequest(self, what, requests, result)

    def alltoall(
        self, buf: Array, send_counts: Sequence[int], recv_counts: Sequence[int], axes: Axes, tag: str = ""
    ) -> Request:
        what = f"alltoall {tag!r}"
        axes = proper_axes(self.grid, axes)
        group = self.group(axes)
        place = group.index(self.rank)
        check_counts(send_counts, len(group), what)
        check_counts(recv_counts, len(group), what)
        check_buffer(buf, sum(send_counts), what)
        if send_counts[place] != recv_counts[place]:
            raise CommError(
                f"{what}: rank {self.rank} sends {send_counts[place]} elements to itself but expects "
                f"{recv_counts[place]}."
            )
        if not axes:
            return Done(buf)
        self._check_dtype(buf.dtype, what)
        self._count("alltoall", tag, buf, sent_pieces(send_counts, place))
        result = np.empty(sum(recv_counts), buf.dtype)
        sends, recvs = _pieces(buf, send_counts), _pieces(result, recv_counts)
        recvs[place][:] = sends[place]
        requests = self._messages(axes, what, sends, recvs, place)
        return _MpiRequest(self, what, requests, result, keep=buf)

    def exchange(
        self, sends: Mapping[int, Array], recvs: Mapping[int, int], dtype: Any, axes: Axes, tag: str = ""
    ) -> Request:
        what = f"exchange {tag!r}"
        axes = proper_axes(self.grid, axes)
        if not axes:
            return Done(copy_to_self(sends, recvs, dtype, self.rank, what))
        group = self.group(axes)
        dtype = np.dtype(dtype)
        self._check_dtype(dtype, what)
        strange = sorted((set(sends) | set(recvs)) - set(group))
        if strange:
            raise CommError(f"{what}: rank {self.rank} names ranks {strange}, not in its group {list(group)}.")
        for r, buf in sends.items():
            check_buffer(buf, None, what)
            if buf.dtype != dtype:
                raise CommError(f"{what}: rank {self.rank} sends {buf.dtype} to rank {r}, expected {dtype}.")
        own = {self.rank: sends[self.rank]} if self.rank in sends else {}
        result = {r: np.empty(n, dtype) for r, n in recvs.items()}
        result.update(copy_to_self(own, {r: n for r, n in recvs.items() if r == self.rank}, dtype, self.rank, what))
        messages, elements = sent_exchange(sends, self.rank)
        self.counter.add("exchange", tag, messages, elements * dtype.itemsize)
        nothing = np.empty(0, dtype)
        out = [sends.get(r, nothing) for r in group]
        into = [result.get(r, nothing) for r in group]
        requests = self._messages(axes, what, out, into, group.index(self.rank))
        return _MpiRequest(self, what, requests, result, keep=out)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        with self._busy("bcast"):
            return self._comm.bcast(obj, root)

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        with self._busy("gather"):
            return self._comm.gather(obj, root)

    def allgather_obj(self, obj: Any) -> list[Any]:
        with self._busy("allgather_obj"):
            return self._comm.allgather(obj)

    def barrier(self) -> None:
        with self._busy("barrier"):
            self._comm.Barrier()

    def abort(self, message: str) -> NoReturn:
        print(message, file=sys.stderr, flush=True)
        self._comm.Abort(1)
        os._exit(1)  # not reached with any MPI known to us

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._mpi.Is_finalized():
            for comm in [*self._comms.values(), self._comm]:
                comm.Free()

    def _group_comm(self, axes: Axes) -> Any:
        if self._closed:
            raise CommError(f"rank {self.rank}: the transport is closed.")
        if axes not in self._comms:
            with self._busy(f"making the group over axes {axes}"):
                world = self._comm.Get_group()
                members = world.Incl(list(self.group(axes)))
                # A tag of its own per set of axes: two groups that share members are told apart while being made.
                comm = self._comm.Create_group(members, sum(1 << a for a in axes) % TAGS)
                comm.Set_errhandler(self._mpi.ERRORS_RETURN)
                members.Free()
                world.Free()
            self._comms[axes] = comm
        return self._comms[axes]

    def _messages(
        self, axes: Axes, what: str, sends: Sequence[np.ndarray], recvs: Sequence[np.ndarray], place: int
    ) -> list[Any]:
        """Start the messages between this member and all others; chunks of one piece arrive in the order sent."""
        comm = self._group_comm(axes)
        order = self._order.get(axes, 0)
        self._order[axes] = order + 1
        # All members number their exchanges alike, so two outstanding ones of a pair never meet.
        tag = order % TAGS
        with self._errors(what):
            requests = [
                comm.Irecv(part, i, tag)
                for i, piece in enumerate(recvs)
                if i != place
                for part in _chunks(piece, self._limit)
            ]
            requests += [
                comm.Isend(part, i, tag)
                for i, piece in enumerate(sends)
                if i != place
                for part in _chunks(piece, self._limit)
            ]
        return requests

    def _op(self, op: Reduction) -> Any:
        return self._mpi.SUM if op == "sum" else self._mpi.MAX

    def _count(self, kind: str, tag: str, buf: np.ndarray, sent: tuple[int, int]) -> None:
        self.counter.add(kind, tag, sent[0], sent[1] * buf.dtype.itemsize)

    def _check_dtype(self, dtype: np.dtype, what: str) -> None:
        if dtype.char not in _DTYPES:
            raise Unsupported(f"{what}: MPI has no type for {dtype}; send float32 or float64.")

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as e:
            raise CommError(f"rank {self.rank}: {what}: MPI reports {e.Get_error_string()!r}.") from e

    @contextmanager
    def _busy(self, what: str) -> Iterator[None]:
        if self._watch is not None:
            self._watch.enter(what)
        try:
            with self._errors(what):
                yield
        finally:
            if self._watch is not None:
                self._watch.leave()


class _MpiRequest(Request):
    """MPI requests that together make one operation.

    ``keep`` holds the buffers that MPI still reads; ``then`` is what is left to do when all has arrived.
    """

    def __init__(
        self,
        transport: MpiTransport,
        what: str,
        requests: list[Any],
        result: Any,
        keep: Any = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        self._transport, self._what = transport, what
        self._requests, self._result, self._keep, self._then = requests, result, keep, then

    def wait(self) -> Any:
        if self._requests:
            with self._transport._busy(self._what):
                self._finish()
        self._done()
        return self._result

    def _done(self) -> None:
        then, self._then = self._then, None
        self._requests, self._keep = [], None
        if then is not None:
            then()

    def _finish(self) -> None:
        mpi = self._transport._mpi
        if self._transport._patient:
            for _ in range(LOOKS):
                if mpi.Request.Testall(self._requests):
                    return
            while not mpi.Request.Testall(self._requests):
                time.sleep(NAP)
        else:
            mpi.Request.Waitall(self._requests)

    def test(self) -> bool:
        if self._requests:
            with self._transport._errors(self._what):
                if not self._transport._mpi.Request.Testall(self._requests):
                    return False
        self._done()
        return True


def load_mpi() -> Any:
    """The ``mpi4py.MPI`` module, initialised; also when someone else has initialised MPI before.

    Raises
    ------
    CommError
        mpi4py or its MPI library is not installed, or MPI has been finalized.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is None:
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, mpi4py.rc.initialize
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:
        raise CommError(
            f"MPI: mpi4py cannot be used ({e}). Install it together with an MPI: pip install 'lbpar[mpi]', or "
            "'lbpar[mpi4py-only]' where the machine has an MPI of its own."
        ) from e
    if MPI.Is_finalized():
        raise CommError("MPI: it was finalized before lbpar could use it. Call MPI.Finalize() after lbpar is done.")
    if not MPI.Is_initialized():
        _initialise(MPI)
    return MPI


def _initialise(mpi: Any) -> None:
    """Start MPI without holding up this process' other threads: mpi4py would, and who looks whether all ranks come is a thread."""
    try:
        start = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (OSError, AttributeError):
        mpi.Init_thread()
        return
    if start(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int())):
        raise CommError("MPI: it could not be started; what it says of that is above.")
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # an error becomes an exception, as mpi4py has it


def node_share(comm: Any) -> tuple[int, int]:
    """Ranks of ``comm`` on this node, and the cores that they may use. Collective over ``comm``."""
    node = comm.Split_type(load_mpi().COMM_TYPE_SHARED)
    # Each rank may be bound to cores of its own, so the cores of all of them together count.
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set().union(*node.allgather(own))
    ranks = int(node.Get_size())
    node.Free()
    return ranks, len(cores)


def _chunks(buf: np.ndarray, limit: int) -> list[np.ndarray]:
    if 0 < buf.size <= limit:
        return [buf]
    return [buf[i : i + limit] for i in range(0, buf.size, limit)]


def _pieces(buf: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    out, start = [], 0
    for n in counts:
        out.append(buf[start : start + n])
        start += n
    return out
