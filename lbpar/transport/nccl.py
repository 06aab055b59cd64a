"""Moves of device arrays by NCCL, through CuPy; control stays on the transport of the host.

All moves run one after the other in a stream of their own, beside the kernels: each starts after an event of the compute stream, and
ends with one. Groups are split off a communicator of all ranks that carries nothing itself, so that a group may be made while others
are busy.

NCCL's reduce-scatter and allgather want equal counts; with others they are reductions to, and broadcasts from, each member, in one
group of calls. Counts above ``limit`` go in several calls.

The device can record moves with its kernels: where it records, the event after which a move starts draws the stream of moves into that,
and `NcclTransport.join` leads it back. Since that stream is one, NCCL's kernels follow each other in what is recorded, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, pairwise
from typing import Any, NoReturn

from lbpar.engine.device import Device, Event
from lbpar.errors import CommError, Unsupported
from lbpar.layout.grid import Axes, Grid
from lbpar.transport.base import Array, Transport, proper_axes
from lbpar.transport.calls import Call
from lbpar.transport.ending import Holder, hold, unhold
from lbpar.transport.request import Request

LIMIT = 1 << 30
"""Most elements in one call."""

_TYPES = {
    "int8": "INT8", "uint8": "UINT8", "int32": "INT32", "uint32": "UINT32", "int64": "INT64", "uint64": "UINT64",
    "float16": "FLOAT16", "float32": "FLOAT32", "float64": "FLOAT64", "bfloat16": "BFLOAT16",
}  # fmt: skip


class NcclTransport(Transport, Holder):
    """The transport of one process with a device of its own.

    Parameters
    ----------
    control : Transport
        Carries objects, and the number by which ranks find each other.
    limit : int
        Most elements in one call of NCCL. Tests make it tiny.

    Raises
    ------
    CommError
        NCCL is not installed, or cannot connect the ranks.
    """

    name = "NCCL"
    direct = True
    recordable = True

    def __init__(self, control: Transport, limit: int = LIMIT) -> None:
        self.control, self._limit = control, limit
        self.rank, self.size, self.counter = control.rank, control.size, control.counter
        self.grid: Grid = control.grid
        self._comms: dict[Axes, Any] = {}
        self._world: Any = None
        self._open, self.joins = False, 0

    def connect(self) -> None:
        """Connect the ranks, whose current devices must differ. Collective over all ranks; where one cannot, all raise."""
        self._nccl, unique, failed = load_nccl(), None, ""
        try:
            with self._errors("connecting all ranks"):
                unique = self._nccl.get_unique_id() if self.rank == 0 else None
        except CommError as error:
            failed = str(error)
        unique = self.control.bcast(unique)
        try:
            if unique is not None:
                with self._errors("connecting all ranks"), self._waiting("all ranks to connect"):
                    self._world = self._nccl.NcclCommunicator(self.size, unique, self.rank)
        except CommError as error:
            failed = str(error)
        failures = [(rank, text) for rank, text in enumerate(self.control.allgather_obj(failed)) if text]
        if failures:
            if self._world is not None:  # of which some are missing
                self._world.abort()
                self._world = None
            raise CommError("on rank {}, {}".format(*failures[0]))
        hold(self)

    def attach(self, device: Device) -> None:
        assert not device.host
        if self._world is None:
            self.connect()
        self.device = device
        self._cuda = device.cupy.cuda  # type: ignore[attr-defined]
        self._stream = self._cuda.Stream(non_blocking=True)
        # NCCL waits for ever for a rank that is gone, and the host for the device: the watch has to know.
        device.waiting = lambda: self.control.waiting("the GPU")  # type: ignore[attr-defined]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return self.control.bcast(obj, root)

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        return self.control.gather(obj, root)

    def allgather_obj(self, obj: Any) -> list[Any]:
        return self.control.allgather_obj(obj)

    def barrier(self) -> None:
        self.control.barrier()

    def abort(self, message: str) -> NoReturn:
        self.control.abort(message)

    def aborts(self) -> list[Callable[[], object]]:
        # Side by side: an abort may wait for all work of the device, where kernels of the others wait for a rank that is
        # gone (NVIDIA/nccl#1013). It does wait for recordings that hold calls of the communicator, aborted or not.
        return [self.device.drop_captures, *(comm.abort for comm in (*list(self._comms.values()), self._world))]

    def close(self) -> None:
        self.disconnect()
        self.control.close()

    def disconnect(self) -> None:
        if self._world is not None:
            self.device.synchronize()  # what it has recorded runs in its own queue
            with self._waiting("to disconnect"):
                if not self.device.host:
                    self._stream.synchronize()
                    self.device.drop_captures()  # a communicator does not end before them
                unhold(self)  # what is being destroyed must not be aborted
                for comm in (*self._comms.values(), self._world):
                    comm.destroy()
            self._comms, self._world = {}, None

    def prepare(self, axes_sets: Iterable[Axes]) -> None:
        for axes in axes_sets:
            self._comm(proper_axes(self.grid, axes))

    def join(self) -> None:
        if self._open:
            self.device.wait(self._end())
            self._open = False
            self.joins += 1

    def _end(self) -> Event:
        event = self._cuda.Event(disable_timing=True)
        event.record(self._stream)
        return event

    def _comm(self, axes: Axes) -> Any:
        if axes not in self._comms:
            what = f"making the group over axes {axes}"
            with self._errors(what), self._waiting(what):
                self._comms[axes] = self._world.commSplit(self.group(axes)[0], self.rank)
        return self._comms[axes]

    def _start(self, call: Call, buf: Any, out: Any, after: Event) -> Request:
        assert call.dtype is not None
        kind = _TYPES.get(call.dtype.name)
        if kind is None:
            raise Unsupported(f"{call.title}: NCCL has no type for {call.dtype}; send float32 or float64.")
        group = self.group(call.axes)
        messages, elements = call.sent(group, self.rank)
        self.counter.add(call.kind, call.tag, messages, elements * call.dtype.itemsize)
        comm = self._comm(call.axes)
        self._stream.wait_event(after)
        self._open = True
        with self._errors(call.title), self._waiting(call.title):
            launch = getattr(self, f"_{call.kind}")
            result = launch(_Calls(self, comm, kind, call), group.index(self.rank), buf, out)
        return _NcclRequest(self, (buf, out, result), result, self._end())

    def _allreduce(self, calls: _Calls, place: int, buf: Array, out: Array) -> Array:
        for part in calls.parts(buf):
            calls("allReduce", part, part, part.size, op=True)
        return buf

    def _reduce_scatter(self, calls: _Calls, place: int, buf: Array, out: None) -> Array:
        counts = calls.call.counts
        result = self.device.empty((counts[place],), buf.dtype)
        self._stream.wait_event(self.device.record())  # kernels may have used that memory until now
        if len(set(counts)) == 1 and buf.size <= self._limit:
            calls("reduceScatter", buf, result, counts[0], op=True)
            return result
        with calls.together():
            for root, piece in enumerate(_pieces(buf, counts)):
                # Where nothing arrives a reduction still wants an address: the piece's own.
                kept = calls.parts(result if root == place else piece)
                for part, to in zip(calls.parts(piece), kept, strict=True):
                    calls("reduce", part, to, part.size, root=root, op=True)
        return result

    def _allgather(self, calls: _Calls, place: int, buf: Array, out: Array) -> Array:
        counts = calls.call.counts
        if len(set(counts)) == 1 and out.size <= self._limit:
            calls("allGather", buf, out, counts[0])
            return out
        with calls.together():
            for root, piece in enumerate(_pieces(out, counts)):
                given = calls.parts(buf if root == place else piece)
                for part, to in zip(given, calls.parts(piece), strict=True):
                    calls("broadcast", part, to, to.size, root=root)
        return out

    def _alltoall(self, calls: _Calls, place: int, buf: Array, out: Array) -> Array:
        sends = _pieces(buf, list(calls.call.send.values()))
        recvs = _pieces(out, list(calls.call.recv.values()))
        if recvs[place].nbytes:
            self._cuda.runtime.memcpyAsync(
                recvs[place].data.ptr, sends[place].data.ptr, recvs[place].nbytes, 3, self._stream.ptr
            )
        self._messages(calls, place, dict(enumerate(sends)), dict(enumerate(recvs)))
        return out

    def _exchange(self, calls: _Calls, place: int, buf: dict[int, Array], out: dict[int, Array]) -> dict[int, Array]:
        group = self.group(calls.call.axes)
        sends, recvs = ({group.index(r): a for r, a in arrays.items()} for arrays in (buf, out))
        self._messages(calls, place, sends, recvs)
        return out

    def _messages(self, calls: _Calls, place: int, sends: dict[int, Array], recvs: dict[int, Array]) -> None:
        with calls.together():
            for method, arrays in (("send", sends), ("recv", recvs)):
                for peer, array in sorted(arrays.items()):
                    for part in calls.parts(array) if peer != place else ():
                        calls(method, part, part.size, root=peer)

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        """In this block the host calls NCCL, which connects ranks when they first need it, and waits for all of them to come."""
        return self.control.waiting(f"NCCL, {what}")

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._nccl.NcclError as e:
            raise CommError(
                f"{what}: NCCL reports {e}. Each rank needs a device of its own, and NCCL a network that it can use; NCCL_DEBUG=WARN says "
                "more, and engine.transport: host goes without NCCL."
            ) from e


class _Calls:
    """Calls of one communicator for one operation."""

    def __init__(self, transport: NcclTransport, comm: Any, kind: str, call: Call) -> None:
        nccl = transport._nccl
        self.call, self._comm, self._nccl, self._limit = call, comm, nccl, transport._limit
        self._type, self._op = getattr(nccl, f"NCCL_{kind}"), nccl.NCCL_MAX if call.op == "max" else nccl.NCCL_SUM
        self._stream = transport._stream.ptr

    def __call__(self, method: str, *args: Any, root: int | None = None, op: bool = False) -> None:
        given = [a if isinstance(a, int) else a.data.ptr for a in args]
        given.append(self._type)
        if op:
            given.append(self._op)
        if root is not None:
            given.append(root)
        getattr(self._comm, method)(*given, self._stream)

    def parts(self, array: Array) -> list[Array]:
        """An array in pieces that one call takes."""
        return [array[i : i + self._limit] for i in range(0, array.size, self._limit)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is called inside happens side by side."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()


class _NcclRequest(Request):
    def __init__(self, transport: NcclTransport, keep: Any, result: Any, event: Event) -> None:
        super().__init__(transport.device, keep, result)
        self._transport, self._event, self._joins = transport, event, transport.joins

    def test(self) -> bool:
        return True  # the host never waits, and must not ask about an event that was recorded

    def _finish(self) -> Event:
        return self._event if self._joins == self._transport.joins else None


def load_nccl() -> Any:
    """CuPy's binding of NCCL, with the library; CommError says what to install."""
    try:
        from cupy.cuda import nccl

        if nccl.available:
            return nccl
        reason = "libnccl.so.2 is not there"
    except ImportError as error:
        reason = str(error)
    raise CommError(
        f"NCCL cannot be loaded ({reason}): pip install 'lbpar[cuda13]' or 'lbpar[cuda12]', which bring it."
    )


def _pieces(buf: Array, counts: Sequence[int]) -> list[Array]:
    ends = list(accumulate(counts, initial=0))
    return [buf[a:b] for a, b in pairwise(ends)]
