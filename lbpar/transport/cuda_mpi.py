"""Moves of device arrays by an MPI library that reads and writes device memory itself ("CUDA-aware").

MPI knows nothing of streams: a message may leave once the kernels before it have run, and kernels may read what arrived once MPI says
that it has. So a move whose arrays are not ready is held back, without holding up the host, until they are or it is waited for. Moves
leave in the order in which they were started.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from lbpar.engine.device import Device, Event
from lbpar.errors import CommError
from lbpar.transport.base import Array, Transport
from lbpar.transport.calls import Call
from lbpar.transport.mpi import LIMIT, MpiTransport, cut_up
from lbpar.transport.request import Request


class CudaMpiTransport(MpiTransport):
    """The transport of one MPI process with a device.

    Parameters
    ----------
    control : Transport
        By MPI. It is closed with this one.
    nonblocking : bool
        Whether collective operations may run beside the host. Some libraries take device memory in blocking ones only.
    limit : int
        Most elements in one MPI call.

    Raises
    ------
    CommError
        The ranks are not processes of MPI.
    """

    name = "CUDA-aware MPI"
    direct = True

    def __init__(self, control: Transport, nonblocking: bool = True, limit: int = LIMIT) -> None:
        inner = getattr(control, "inner", control)  # below the checked mode
        if not isinstance(inner, MpiTransport):
            raise CommError(
                f"engine.transport: mpi needs ranks that MPI started, but these are connected by {control.name}."
            )
        super().__init__(inner._comm, control.grid, limit=limit, watch=inner._watch, patient=inner._patient)
        self.control, self.counter = control, control.counter
        self.own_cores = False  # sums are made beside the kernels, whatever the cores do
        self._nonblocking, self._waiting = nonblocking, deque[_Held]()

    def attach(self, device: Device) -> None:
        self.device = self.room = device
        device.waiting = lambda: self.waiting("the GPU")  # type: ignore[attr-defined]

    def close(self) -> None:
        self.disconnect()
        self.control.close()

    def disconnect(self) -> None:
        super().close()

    def _start(self, call: Call, buf: Any, out: Any, after: Event) -> Request:
        if call.kind in ("allgather", "alltoall"):
            place, to = self.group(call.axes).index(self.rank), call.recv.values() or call.counts
            own = cut_up(buf, call.send.values())[place] if call.kind == "alltoall" else buf
            self.device.copy(own, out=cut_up(out, to)[place])
            after = self.device.record()
        elif call.kind == "reduce_scatter" and buf.size <= self._limit:
            # Now, and not when it leaves: kernels that have been queued by then may still use the memory that it would get.
            out = self.device.empty((call.counts[self.group(call.axes).index(self.rank)],), buf.dtype)
            after = self.device.record()
        held = _Held(self, call, buf, out, after)
        self._waiting.append(held)
        self._release()
        return held

    def _release(self, until: _Held | None = None) -> None:
        """Start the moves whose arrays are ready, and all up to one of them."""
        while self._waiting and (self._waiting[0].ready() or (until is not None and until in self._waiting)):
            self._waiting.popleft().start()

    def _begin_now(self, held: _Held) -> Request:
        return super()._start(held.call, held.buf, held.out, None)

    def _keep(self, piece: Array, out: Array) -> None:
        """Nothing: that copy is a kernel, and MPI may want to send it on."""

    def _group_comm(self, axes: Any) -> Any:
        comm = super()._group_comm(axes)
        return comm if self._nonblocking else _Blocking(comm, self._mpi.REQUEST_NULL)


class _Held(Request):
    """A move that starts when its arrays are ready."""

    def __init__(self, transport: CudaMpiTransport, call: Call, buf: Any, out: Any, after: Event) -> None:
        super().__init__(transport.device, (buf, out), None)
        self.call, self.buf, self.out = call, buf, out
        self._transport, self._after = transport, after
        self._inner: Request | None = None

    def ready(self) -> bool:
        """Whether all that must come before has happened."""
        return bool(self._after.done)

    def start(self) -> None:
        """Hand the move to MPI, once all that must come before has happened."""
        with self._device.waiting():  # type: ignore[attr-defined]
            self._after.synchronize()
        self._inner = self._transport._begin_now(self)
        self.buf = self.out = None

    def test(self) -> bool:
        self._transport._release()
        return self._inner is not None and self._inner.test()

    def _finish(self) -> Event:
        self._transport._release(until=self)
        assert self._inner is not None
        self._result = self._inner.wait()


class _Blocking:
    """A communicator whose collective operations have ended when they return."""

    def __init__(self, comm: Any, done: Any) -> None:
        self._comm, self._done = comm, done

    def __getattr__(self, name: str) -> Any:
        if name not in ("Iallreduce", "Ireduce_scatter", "Ireduce", "Iallgatherv", "Ibcast"):
            return getattr(self._comm, name)
        blocking = getattr(self._comm, name[1:].capitalize())

        def call(*args: Any) -> Any:
            blocking(*args)
            return self._done

        return call
