"""Ranks are MPI processes; arrays are in host memory, or on devices that the MPI library can read (`lbpar.transport.cuda_mpi`).

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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NoReturn

import numpy as np

from lbpar.engine.device import Event
from lbpar.errors import CommError, Unsupported
from lbpar.layout.grid import Axes, Grid
from lbpar.transport.base import Array, Counter, Transport, proper_axes, reduce_into
from lbpar.transport.calls import Call, pieces
from lbpar.transport.ending import abort_all
from lbpar.transport.request import Done, Request
from lbpar.transport.watch import START, Watch, hang_seconds

LIMIT = 2**31 - 1
"""Most elements in one MPI call."""

SUM_CHUNK = 1 << 20
"""Most elements in one call of a long allreduce: its pieces then overlap. 44 MB of float32 took half the time on two ranks and two
thirds on four (Open MPI 5, shared memory), against one call."""

PAIRWISE = 1 << 15
"""Bytes per member from which on a reduce-scatter is messages between all pairs and sums by the receivers: the same bytes, and several
times as fast as MPI's (16 MB a member, two ranks: 4 instead of 17 ms)."""

SUMS = ("allreduce", "reduce_scatter")

TAGS = 32768
"""MPI guarantees message tags 0 ... 32767."""

LOOKS = 20
"""Looks at a request before a patient wait begins to sleep."""

NAP = 1e-4
"""Seconds of sleep between looks of a patient wait."""

OVERSUBSCRIBED = 8
"""Ranks per core from which on a wait that sleeps beats MPICH's own, measured on 2 cores (docs/mpi.md)."""

_DTYPES = frozenset("?bBhHiIlLqQfdFD")


class MpiTransport(Transport):
    """The transport of one MPI process, for arrays in host memory. Making one is collective over ``comm``.

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
        Sleep while waiting; default: on nodes with more ranks than cores (Open MPI), or ``OVERSUBSCRIBED`` times as many.

    Raises
    ------
    CommError
        The grid does not have as many processes as ``comm``, or MPI has been finalized.
    """

    name = "MPI"

    parts_differ = True

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
        with self._blocking("all ranks to connect", hang_seconds(START)):
            self._comm = comm.Dup()
            self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)  # an error becomes an exception, not the end
            ranks, cores = node_share(self._comm)
        per_core = ranks / cores
        self.own_cores = ranks == self.size and per_core <= 1
        if patient is None:
            patient = per_core > 1 if self._mpi.get_vendor()[0] == "Open MPI" else per_core >= OVERSUBSCRIBED
        self._patient = patient
        self._comms: dict[Axes, Any] = {}
        self._order: dict[Axes, int] = defaultdict(int)
        self._closed = False

    def prepare(self, axes_sets: Iterable[Axes]) -> None:
        for axes in axes_sets:
            self._group_comm(proper_axes(self.grid, axes))

    def _start(self, call: Call, buf: Any, out: Any, after: Event) -> Request:
        assert call.dtype is not None
        if call.dtype.char not in _DTYPES:
            summed = call.kind in SUMS and not (self.room.host and call.dtype.name == "bfloat16")
            if summed or call.dtype.itemsize != 2:
                raise Unsupported(
                    f"{call.title}: MPI has no type for {call.dtype}; send float32 or float64, or use NCCL (engine.transport)."
                )
            bits = replace(call, dtype=np.dtype(np.uint16))
            return _Viewed(MpiTransport._start(self, bits, _bits(buf), _bits(out), after), out, call.dtype)
        group = self.group(call.axes)
        comm = self._group_comm(call.axes)
        messages, elements = call.sent(group, self.rank)
        self.counter.add(call.kind, call.tag, messages, elements * call.dtype.itemsize)
        start = getattr(self, f"_{call.kind}")
        request: Request = start(call, comm, group.index(self.rank), buf, out)
        return request

    def _allreduce(self, call: Call, comm: Any, place: int, buf: Array, out: Array) -> Request:
        parts, op = _chunks(buf, min(self._limit, SUM_CHUNK)), self._op(call)
        if call.blocking and not self._patient:
            with self._blocking(call.title):
                for part in parts:
                    comm.Allreduce(self._mpi.IN_PLACE, part, op)
            return Done(buf)
        with self._errors(call.title):
            return _MpiRequest(self, call, [comm.Iallreduce(self._mpi.IN_PLACE, p, op) for p in parts], buf, buf)

    def _reduce_scatter(self, call: Call, comm: Any, place: int, buf: Array, out: Array | None) -> Request:
        pieces, op = cut_up(buf, call.counts), self._op(call)
        own = pieces[place]
        if self.room.host and buf.nbytes >= PAIRWISE * len(pieces):
            arrived = [self.room.empty((0 if p is own else own.size,), buf.dtype) for p in pieces]
            requests = self._messages(call, comm, pieces, arrived, place)

            def add() -> None:
                for part in arrived:
                    if part.size:
                        reduce_into(_values(own), _values(part), "sum" if call.op == "sum" else "max")

            return _MpiRequest(self, call, requests, (buf, arrived), own, then=add)
        with self._errors(call.title):
            if buf.size <= self._limit:
                result = self.room.empty((own.size,), buf.dtype) if out is None else out
                requests = [comm.Ireduce_scatter(buf, result, list(call.counts), op)] if buf.size else []
                return _MpiRequest(self, call, requests, buf, result)
            requests = []
            for root, piece in enumerate(pieces):
                for part in _chunks(piece, self._limit):
                    send, recv = (self._mpi.IN_PLACE, part) if root == place else (part, None)
                    requests.append(comm.Ireduce(send, recv, op, root))
        return _MpiRequest(self, call, requests, buf, own)

    def _allgather(self, call: Call, comm: Any, place: int, buf: Array, out: Array) -> Request:
        with self._errors(call.title):
            if out.size <= self._limit:
                requests = [comm.Iallgatherv(buf, [out, list(call.counts)])] if out.size else []
                return _MpiRequest(self, call, requests, buf, out)
            pieces = cut_up(out, call.counts)
            self._keep(buf, pieces[place])
            requests = [
                comm.Ibcast(part, root) for root, piece in enumerate(pieces) for part in _chunks(piece, self._limit)
            ]
        return _MpiRequest(self, call, requests, buf, out)

    def _alltoall(self, call: Call, comm: Any, place: int, buf: Array, out: Array) -> Request:
        sends, recvs = cut_up(buf, call.send.values()), cut_up(out, call.recv.values())
        self._keep(sends[place], recvs[place])
        return _MpiRequest(self, call, self._messages(call, comm, sends, recvs, place), buf, out)

    def _exchange(self, call: Call, comm: Any, place: int, buf: dict[int, Array], out: dict[int, Array]) -> Request:
        group, nothing = self.group(call.axes), np.empty(0, call.dtype)
        sends, recvs = ([arrays.get(r, nothing) for r in group] for arrays in (buf, out))
        return _MpiRequest(self, call, self._messages(call, comm, sends, recvs, place), buf, out)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        with self._blocking("bcast"):
            return self._comm.bcast(obj, root)

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        with self._blocking("gather"):
            return self._comm.gather(obj, root)

    def allgather_obj(self, obj: Any) -> list[Any]:
        with self._blocking("allgather_obj"):
            return self._comm.allgather(obj)

    def barrier(self) -> None:
        with self._blocking("barrier"):
            self._comm.Barrier()

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return self._blocking(what)

    def abort(self, message: str) -> NoReturn:
        print(message, file=sys.stderr, flush=True)
        abort_all()
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
            with self._blocking(f"making the group over axes {axes}"):
                world = self._comm.Get_group()
                members = world.Incl(list(self.group(axes)))
                # A tag of its own per set of axes: two groups that share members are told apart while being made.
                comm = self._comm.Create_group(members, sum(1 << a for a in axes) % TAGS)
                comm.Set_errhandler(self._mpi.ERRORS_RETURN)
                members.Free()
                world.Free()
            self._comms[axes] = comm
        return self._comms[axes]

    def _messages(self, call: Call, comm: Any, sends: Sequence[Array], recvs: Sequence[Array], place: int) -> list[Any]:
        """Start the messages between this member and all others; chunks of one piece arrive in the order sent."""
        # All members number their exchanges alike, so two outstanding ones of a pair never meet. Of parts they may have different numbers.
        self._order[call.axes] += not call.part
        tag = self._order[call.axes] % TAGS
        with self._errors(call.title):
            return [
                start(part, i, tag)
                for start, arrays in ((comm.Irecv, recvs), (comm.Isend, sends))
                for i, piece in enumerate(arrays)
                if i != place
                for part in _chunks(piece, self._limit)
            ]

    def _keep(self, piece: Array, out: Array) -> None:
        """Put where it belongs what a member sends to itself."""
        out[:] = piece

    def _op(self, call: Call) -> Any:
        if call.dtype == np.uint16:  # the bits of bfloat16: nothing else that is summed has this type
            return _bfloat16_op("sum" if call.op == "sum" else "max")
        return self._mpi.SUM if call.op == "sum" else self._mpi.MAX

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as e:
            raise CommError(f"rank {self.rank}: {what}: MPI reports {e.Get_error_string()!r}.") from e

    @contextmanager
    def _blocking(self, what: str, seconds: float | None = None) -> Iterator[None]:
        if self._watch is not None:
            self._watch.enter(what, seconds)
        try:
            with self._errors(what):
                yield
        finally:
            if self._watch is not None:
                self._watch.leave()


class _Viewed(Request):
    """A move of a type that MPI does not know, as numbers of the same size that it does.

    ``result`` is where it is written, None where the move makes an array of its own.
    """

    def __init__(self, inner: Request, result: Any, dtype: np.dtype[Any]) -> None:
        super().__init__(inner._device, inner, result)
        self._inner, self._dtype = inner, dtype

    def test(self) -> bool:
        return self._inner.test()

    def _finish(self) -> Event:
        found = self._inner.wait()
        if self._result is None:
            self._result = found.view(self._dtype)


def _values(a: Array) -> Array:
    """An array that is summed, whose type may be bfloat16, seen as such."""
    if a.dtype != np.uint16:
        return a
    from ml_dtypes import bfloat16  # which is there where there are arrays of it

    return a.view(bfloat16)


@cache
def _bfloat16_op(op: Literal["sum", "max"]) -> Any:
    """MPI's operation on the bits of bfloat16: each sum is rounded, as every sum of that type is."""

    def reduce(part: Any, total: Any, _: Any) -> None:
        reduce_into(_values(np.frombuffer(total, np.uint16)), _values(np.frombuffer(part, np.uint16)), op)

    return load_mpi().Op.Create(reduce, commute=True)


def _bits(a: Any) -> Any:
    if a is None:
        return None
    return {r: _bits(x) for r, x in a.items()} if isinstance(a, dict) else a.view(np.uint16)


class _MpiRequest(Request):
    """MPI requests that together make one operation.

    ``then`` is what is left to do when all has arrived.
    """

    def __init__(
        self,
        transport: MpiTransport,
        call: Call,
        requests: list[Any],
        keep: Any,
        result: Any,
        then: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(transport.room, keep, result)
        self._transport, self._call, self._requests, self._then = transport, call, requests, then

    def _finish(self) -> Event:
        if self._requests:
            with self._transport._blocking(self._call.title):
                self._wait()
        self._done()

    def _done(self) -> None:
        then, self._then = self._then, None
        self._requests = []
        self._keep = None
        if then is not None:
            then()

    def _wait(self) -> None:
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
            with self._transport._errors(self._call.title):
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
        raise CommError("MPI could not be started; its own message is above.")
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
    return [buf[i : i + limit] for i in range(0, buf.size, limit)]


def cut_up(buf: np.ndarray, counts: Iterable[int]) -> list[np.ndarray]:
    """Consecutive pieces of an array, of these sizes."""
    return [buf[part] for part in pieces(list(counts))]
