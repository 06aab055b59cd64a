"""What every transport offers, and the books it keeps: moves of arrays, apart from control by small objects.

Every operation on arrays is *started* and *waited for*; between the two the caller may compute, but may neither
read nor write the buffers it handed over. Operations over the same axes must be started in the same order by all
members of a group. They may be waited for in any order.

Arrays are one-dimensional and contiguous, and belong to a device (`lbpar.engine.device`), from which all buffers come. A
transfer starts after all that the device's queue held when it was started; ``wait`` returns once the queue has been told to
wait for its end, which on host memory is when it has ended.

Volume convention, in elements that member i of a group of p sends (b_i is its block of n elements under the
"first blocks one larger" rule, c_j the count of member j):

    allreduce        (n - b_i) + (p - 1) b_i    in 2 (p - 1) messages
    reduce_scatter   sum of c_j over j != i     in as many messages as other members have c_j > 0
    allgather        (p - 1) c_i                in p - 1 messages, none if c_i = 0
    alltoall         what goes to others        one message per piece that is not empty
    exchange         what goes to others        one message per piece that is not empty

The cost model prices the same numbers. A group of one sends nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np

from lbpar.engine.device import HOST, Device, Event
from lbpar.errors import CommError
from lbpar.layout.grid import Axes, Grid
from lbpar.transport.calls import Call
from lbpar.transport.request import Done, Request
from lbpar.transport.staging import Staged

Array = Any
"""A 1-D contiguous array of the device."""

Reduction = Literal["sum", "max"]


@dataclass(frozen=True)
class Sent:
    """What one rank sent: number of messages and bytes."""

    messages: int = 0
    bytes: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.messages + other.messages, self.bytes + other.bytes)


class Counter:
    """Messages and bytes that one rank sent, per kind of operation and per tag.

    Counts follow the convention in this module's text, whatever algorithm the MPI library chooses.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[str, str], Sent] = {}
        self._paused = 0

    def add(self, kind: str, tag: str, messages: int, nbytes: int) -> None:
        """Enter one operation. An operation that sends nothing is entered too, so that it can be seen."""
        if not self._paused:
            key = (kind, tag)
            self._sent[key] = self._sent.get(key, Sent()) + Sent(int(messages), int(nbytes))

    def items(self) -> dict[tuple[str, str], Sent]:
        """A copy of the books: (kind, tag) -> sent."""
        return dict(self._sent)

    def by_tag(self) -> dict[str, Sent]:
        """Sent per tag."""
        out: dict[str, Sent] = {}
        for (_, tag), sent in self._sent.items():
            out[tag] = out.get(tag, Sent()) + sent
        return out

    def total(self) -> Sent:
        """Everything sent since the last ``reset``."""
        return sum(self._sent.values(), Sent())

    def reset(self) -> None:
        """Start again from zero."""
        self._sent.clear()

    @contextmanager
    def aside(self) -> Iterator[Counter]:
        """Enter what is counted inside this block in books of its own instead, which are yielded: it is recorded now, and done later."""
        books, mine = Counter(), self._sent
        self._sent = books._sent
        try:
            yield books
        finally:
            self._sent = mine

    def include(self, books: Counter) -> None:
        """Enter what other books hold."""
        if not self._paused:
            for key, sent in books._sent.items():
                self._sent[key] = self._sent.get(key, Sent()) + sent

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count inside this block (checks and self-tests are not part of a program)."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1


class Control(ABC):
    """One rank's access to the other ranks of a job by small Python objects. Everything is collective over all ranks."""

    rank: int
    size: int

    @abstractmethod
    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The object of ``root``, on all ranks."""

    @abstractmethod
    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        """The objects of all ranks in rank order on ``root``, None elsewhere."""

    @abstractmethod
    def allgather_obj(self, obj: Any) -> list[Any]:
        """The objects of all ranks in rank order, on all ranks."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have come here."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """In this block the rank waits for ``what`` that others have a part in: a job in which they never come is ended."""
        return nullcontext()

    @abstractmethod
    def abort(self, message: str) -> NoReturn:
        """End the whole job at once, with ``message`` on standard error and a nonzero exit status; of one rank alone."""


class Moves(ABC):
    """Moves of arrays between the ranks of a grid.

    In every operation ``axes`` names the group: the ranks that share this rank's coordinates on all other axes
    (``grid.group(axes, rank)``, in increasing rank order). The operation is collective over that group. ``tag`` is
    the name under which it is counted, and which errors show. Results may share memory with ``buf``.

    A transport implements `_start`; what does not depend on how bytes travel is done here.

    Attributes
    ----------
    rank, size : int
        This rank and the number of ranks.
    grid : Grid
        The grid of processes; ``grid.size == size``.
    counter : Counter
        What this rank sent.
    device : Device
        Whose arrays are moved: host memory's, until another one is attached.
    room : Device
        Host memory for what the transport itself needs.
    direct : bool
        Whether ``_start`` takes the arrays of a device; else they travel by way of the host.
    own_cores : bool
        Whether all ranks are on one node, each with a core of its own: messages are then copies that their cores make.
    parts_differ : bool
        Whether members of a group may start an exchange, or an all-to-all, in different numbers of parts (`Call.part`).
    recordable : bool
        Whether moves are work of the device's queues alone, which it can record (`Device.capture`).
    """

    rank: int
    size: int
    grid: Grid
    counter: Counter
    device: Device = HOST
    room: Device = HOST
    direct: bool = False
    own_cores: bool = False
    parts_differ: bool = False
    recordable: bool = False
    name: str = "host"

    def attach(self, device: Device) -> None:
        """Move arrays of ``device`` from now on. Collective over all ranks, before the first move."""
        self.device, self.room = device, device if device.host else HOST

    def allreduce(
        self, buf: Array, axes: Axes, op: Reduction = "sum", tag: str = "", blocking: bool = False
    ) -> Request:
        """Reduce ``buf`` element by element over the group.

        Parameters
        ----------
        buf : array, shape (n,)
            This member's part; the same n and dtype on all members. It may be overwritten by the result.
        axes : tuple of int
            Axes of the group.
        op : {"sum", "max"}
            The reduction.
        tag : str
            Name in counts and errors.
        blocking : bool
            It is waited for at once, by all members alike: libraries do that faster.

        Returns
        -------
        Request
            Result: ``buf`` or another array, shape (n,), the same on all members.
        """
        call = Call("allreduce", tag, self._proper(axes), op=op, blocking=blocking)
        check_buffer(buf, None, call)
        call.dtype, call.counts = buf.dtype, (buf.size,)
        return self._begin(call, buf, buf) if call.axes else Done(buf)

    def reduce_scatter(
        self, buf: Array, counts: Sequence[int], axes: Axes, op: Reduction = "sum", tag: str = ""
    ) -> Request:
        """Reduce ``buf`` over the group and keep one's own piece.

        Parameters
        ----------
        buf : array, shape (sum(counts),)
            Pieces in group order; its content is undefined afterwards.
        counts : sequence of int
            ``counts[i]`` elements are for member i; 0 is allowed; the same on all members.

        Returns
        -------
        Request
            Result: shape (counts[own place],).
        """
        call = Call("reduce_scatter", tag, self._proper(axes), op=op, counts=counts)
        self._check(call, buf, counts)
        return self._begin(call, buf, None) if call.axes else Done(buf)

    def allgather(self, buf: Array, counts: Sequence[int], axes: Axes, tag: str = "") -> Request:
        """Join the members' parts.

        Parameters
        ----------
        buf : array, shape (counts[own place],)
        counts : sequence of int
            ``counts[i]`` elements come from member i; 0 is allowed; the same on all members.

        Returns
        -------
        Request
            Result: shape (sum(counts),), parts in group order.
        """
        call = Call("allgather", tag, self._proper(axes), counts=counts)
        self._check(call, buf, counts, own=True)
        return self._begin(call, buf, self.device.empty((sum(counts),), buf.dtype)) if call.axes else Done(buf)

    def alltoall(
        self, buf: Array, send_counts: Sequence[int], recv_counts: Sequence[int], axes: Axes, tag: str = ""
    ) -> Request:
        """Send a piece to each member and receive one from each.

        Parameters
        ----------
        buf : array, shape (sum(send_counts),)
            Pieces in group order.
        send_counts, recv_counts : sequence of int
            Elements for and from each member, own piece included; 0 is allowed.

        Returns
        -------
        Request
            Result: shape (sum(recv_counts),), pieces in group order.
        """
        call = Call("alltoall", tag, self._proper(axes))
        group = self.group(call.axes)
        check_counts(recv_counts, len(group), call)
        self._check(call, buf, send_counts)
        call.send = dict(zip(group, send_counts, strict=True))
        call.recv = dict(zip(group, recv_counts, strict=True))
        self._check_own(call)
        return self._begin(call, buf, self.device.empty((sum(recv_counts),), buf.dtype)) if call.axes else Done(buf)

    def exchange(
        self, sends: Mapping[int, Array], recvs: Mapping[int, int], dtype: Any, axes: Axes, tag: str = ""
    ) -> Request:
        """Point-to-point messages inside the group, as halos need them.

        All members call it, also those with nothing to send or receive.

        Parameters
        ----------
        sends : mapping of world rank to array, shape (n,)
            Empty arrays are allowed and send nothing. A piece for oneself is copied.
        recvs : mapping of world rank to int
            Elements expected from that rank; 0 is allowed.
        dtype : numpy dtype
            Of all messages.

        Returns
        -------
        Request
            Result: dict of world rank to array, one for each key of ``recvs``.
        """
        call = Call("exchange", tag, self._proper(axes), np.dtype(dtype))
        group = self.group(call.axes)
        strange = sorted({*sends, *recvs}.difference(group))
        if strange:
            raise CommError(
                f"{call.title}: rank {self.rank} names ranks {strange}, which are not in its group {list(group)}."
            )
        for r, buf in sends.items():
            check_buffer(buf, None, call)
            if buf.dtype != call.dtype:
                raise CommError(f"{call.title}: rank {self.rank} sends {buf.dtype} to rank {r}, expected {call.dtype}.")
        call.send, call.recv = {r: b.size for r, b in sends.items()}, dict(recvs)
        self._check_own(call)
        result = {
            r: self.device.copy(sends[r]) if r == self.rank and r in sends else self.device.empty((n,), call.dtype)
            for r, n in recvs.items()
        }
        return self._begin(call, sends, result) if call.axes else Done(result)

    def prepare(self, axes_sets: Iterable[Axes]) -> None:  # noqa: B027  most transports have nothing to prepare
        """Make the groups over these axes now, so that the first step does not pay for them. Collective, same order on
        all ranks. Optional: groups are otherwise made when first used."""

    def join(self) -> None:  # noqa: B027  nothing of most transports can be recorded
        """Let the device's queue wait for all moves that were started; whoever waits for them later finds them finished.

        Called before a recording begins and where it ends: no move is part of it that began before, and all that began in it end in it.
        """

    def close(self) -> None:  # noqa: B027  most transports hold nothing
        """Free what the transport holds; the caller's communicator stays. Collective over all ranks."""

    def disconnect(self) -> None:  # noqa: B027  most transports are made over no other
        """Free what the transport holds beside the one that it was made over, which stays open. Collective over all ranks."""

    def group(self, axes: Axes) -> tuple[int, ...]:
        """World ranks of this rank's group over ``axes``, increasing."""
        return self.grid.group(axes, self.rank)

    @abstractmethod
    def _start(self, call: Call, buf: Any, out: Any, after: Event) -> Request:
        """Start an operation of several members, once ``after`` has happened.

        Parameters
        ----------
        call : Call
            What is asked for, checked on this rank.
        buf : array, for an exchange dict of world rank to array
            What this rank gives.
        out : array, for an exchange dict of world rank to array
            Where its result goes (of an exchange, the piece for oneself is there already): for an allreduce ``buf`` itself,
            None for a reduce-scatter, whose result may lie in ``buf``.
        after : Event
        """

    def _begin(self, call: Call, buf: Any, out: Any) -> Request:
        if self.device.host or self.direct:
            return self._start(call, buf, out, self.device.record())
        return Staged(self, call, buf, out)

    def _proper(self, axes: Axes) -> Axes:
        return proper_axes(self.grid, axes)

    def _check(self, call: Call, buf: Array, counts: Sequence[int], own: bool = False) -> None:
        """Refuse counts that do not fit the group, or a buffer that does not fit the counts."""
        group = self.group(call.axes)
        check_counts(counts, len(group), call)
        check_buffer(buf, counts[group.index(self.rank)] if own else sum(counts), call)
        call.dtype = buf.dtype

    def _check_own(self, call: Call) -> None:
        have, want = call.send.get(self.rank, 0), call.recv.get(self.rank, 0)
        if have != want:
            raise CommError(f"{call.title}: rank {self.rank} sends {have} elements to itself but expects {want}.")


class Transport(Moves, Control):
    """Both, as most of lbpar needs them. A device's own transport offers moves, and leaves control to another one."""


def proper_axes(grid: Grid, axes: Axes) -> Axes:
    """The axes that matter, in order: two sets that name the same group become one key."""
    bad = [a for a in axes if not 0 <= a < len(grid.sizes)]
    if bad:
        raise CommError(f"transport: axes {tuple(axes)} name {bad}, but the grid {grid} has axes {grid.axes}.")
    return tuple(a for a in sorted(set(axes)) if grid.sizes[a] > 1)


def check_buffer(buf: Array, count: int | None, call: Call) -> None:
    """Refuse a buffer that a transfer would read wrongly: not 1-D, not contiguous, or not ``count`` elements."""
    if getattr(buf, "ndim", None) != 1 or not buf.flags.c_contiguous:
        shape = getattr(buf, "shape", None)
        raise CommError(
            f"{call.title}: got {type(buf).__name__} of shape {shape}, expected a 1-D contiguous array. "
            "Use numpy.ascontiguousarray(x).reshape(-1)."
        )
    if count is not None and buf.size != count:
        raise CommError(f"{call.title}: the buffer holds {buf.size} elements, but its counts say {count}.")


def check_counts(counts: Sequence[int], members: int, call: Call) -> None:
    """Refuse counts that do not fit the group."""
    if len(counts) != members or any(c < 0 for c in counts):
        raise CommError(f"{call.title}: got counts {list(counts)}, expected {members} counts, none negative.")


def reduce_into(out: np.ndarray, part: np.ndarray, op: Reduction) -> None:
    """``out = op(out, part)`` in place. NaN wins a maximum here; MPI promises nothing about NaN in a maximum."""
    if op == "sum":
        out += part
    else:
        np.maximum(out, part, out=out)
