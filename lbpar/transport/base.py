"""What every transport offers, and the books it keeps.

Every operation on arrays is *started* and *waited for*; between the two the caller may compute, but may neither
read nor write the buffers it handed over. Operations over the same axes must be started in the same order by all
members of a group. They may be waited for in any order.

Arrays are one-dimensional and contiguous. Today they are NumPy arrays in host memory. The interface leaves room for
arrays on a device: starting an operation then means *after the event that the caller's stream has recorded*, and
``wait`` returns once the caller's stream has been told to wait for the event that ends the transfer, not when
the bytes have arrived. A caller that only passes results on to kernels of the same stream needs no other change.

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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np

from lbpar.errors import CommError
from lbpar.layout.grid import Axes, Grid

Array = Any
"""A 1-D contiguous array: ``numpy.ndarray`` today, an array on a device later."""

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

    def by_kind(self) -> dict[str, Sent]:
        """Sent per kind: allreduce, reduce_scatter, allgather, alltoall, exchange."""
        return self._group(0)

    def by_tag(self) -> dict[str, Sent]:
        """Sent per tag."""
        return self._group(1)

    def total(self) -> Sent:
        """Everything sent since the last ``reset``."""
        return sum(self._sent.values(), Sent())

    def reset(self) -> None:
        """Start again from zero."""
        self._sent.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count inside this block (checks and self-tests are not part of a program)."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _group(self, part: int) -> dict[str, Sent]:
        out: dict[str, Sent] = {}
        for key, sent in self._sent.items():
            out[key[part]] = out.get(key[part], Sent()) + sent
        return out


class Request(ABC):
    """An operation that was started."""

    @abstractmethod
    def wait(self) -> Any:
        """Finish the operation and return its result. Later calls return the same result."""

    @abstractmethod
    def test(self) -> bool:
        """Make progress without blocking; True once ``wait`` would return at once."""


class Done(Request):
    """A request that was complete when it was made."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result

    def test(self) -> bool:
        return True


class Transport(ABC):
    """One rank's access to the other ranks of a grid.

    In every array operation ``axes`` names the group: the ranks that share this rank's coordinates on all other axes
    (``grid.group(axes, rank)``, in increasing rank order). The operation is collective over that group. ``tag`` is
    the name under which it is counted, and which errors show. Results may share memory with ``buf``.

    Attributes
    ----------
    rank, size : int
        This rank and the number of ranks.
    grid : Grid
        The grid of processes; ``grid.size == size``.
    counter : Counter
        What this rank sent.
    own_cores : bool
        Whether all ranks are on one node, each with a core of its own: messages are then copies that their cores make.
    """

    rank: int
    size: int
    grid: Grid
    counter: Counter
    own_cores: bool = False

    @abstractmethod
    def allreduce(self, buf: Array, axes: Axes, op: Reduction = "sum", tag: str = "") -> Request:
        """Reduce ``buf`` element by element over the group.

        Parameters
        ----------
        buf : array, shape (n,)
            This member's part; the same n and dtype on all members. It is overwritten by the result.
        axes : tuple of int
            Axes of the group.
        op : {"sum", "max"}
            The reduction.
        tag : str
            Name in counts and errors.

        Returns
        -------
        Request
            Result: ``buf``, shape (n,), the same on all members.
        """

    def allreduce_now(self, buf: Array, axes: Axes, op: Reduction = "sum", tag: str = "") -> Array:
        """`allreduce` started and waited for in one call, by all members alike: libraries do that faster."""
        return self.allreduce(buf, axes, op, tag).wait()

    @abstractmethod
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

    @abstractmethod
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

    @abstractmethod
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

    @abstractmethod
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

    @abstractmethod
    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Small Python object of ``root``, on all ranks. Collective over all ranks, blocking."""

    @abstractmethod
    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Small Python objects of all ranks in rank order on ``root``, None elsewhere. Collective, blocking."""

    @abstractmethod
    def allgather_obj(self, obj: Any) -> list[Any]:
        """Small Python objects of all ranks in rank order, on all ranks. Collective, blocking."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have come here. Collective, blocking."""

    @abstractmethod
    def abort(self, message: str) -> NoReturn:
        """End the whole job at once, with ``message`` on standard error and a nonzero exit status."""

    def prepare(self, axes_sets: Iterable[Axes]) -> None:  # noqa: B027  most transports have nothing to prepare
        """Make the groups over these axes now, so that the first step does not pay for them. Collective, same order on
        all ranks. Optional: groups are otherwise made when first used."""

    def close(self) -> None:  # noqa: B027  most transports hold nothing
        """Free what the transport holds; the caller's communicator stays. Collective over all ranks."""

    def group(self, axes: Axes) -> tuple[int, ...]:
        """World ranks of this rank's group over ``axes``, increasing."""
        return self.grid.group(axes, self.rank)


def block_sizes(n: int, parts: int) -> list[int]:
    """Sizes of ``parts`` blocks of n elements, the first blocks one larger."""
    q, r = divmod(n, parts)
    return [q + (i < r) for i in range(parts)]


def proper_axes(grid: Grid, axes: Axes) -> Axes:
    """The axes that matter, in order: two sets that name the same group become one key."""
    bad = [a for a in axes if not 0 <= a < len(grid.sizes)]
    if bad:
        raise CommError(f"transport: axes {tuple(axes)} name {bad}, but the grid {grid} has axes {grid.axes}.")
    return tuple(a for a in sorted(set(axes)) if grid.sizes[a] > 1)


def check_buffer(buf: Array, count: int | None, what: str) -> None:
    """Refuse a buffer that a transfer would read wrongly: not 1-D, not contiguous, or not ``count`` elements."""
    if getattr(buf, "ndim", None) != 1 or not buf.flags.c_contiguous:
        shape = getattr(buf, "shape", None)
        raise CommError(
            f"{what}: got {type(buf).__name__} of shape {shape}, expected a 1-D contiguous array. "
            "Use numpy.ascontiguousarray(x).reshape(-1)."
        )
    if count is not None and buf.size != count:
        raise CommError(f"{what}: the buffer holds {buf.size} elements, but its counts say {count}.")


def check_counts(counts: Sequence[int], members: int, what: str) -> None:
    """Refuse counts that do not fit the group."""
    if len(counts) != members or any(c < 0 for c in counts):
        raise CommError(f"{what}: got counts {list(counts)}, expected {members} counts, none negative.")


def sent_allreduce(n: int, place: int, members: int) -> tuple[int, int]:
    """(messages, elements) that a member sends in an allreduce of n elements."""
    b = block_sizes(n, members)[place]
    return 2 * (members - 1), (n - b) + (members - 1) * b


def sent_pieces(counts: Sequence[int], place: int) -> tuple[int, int]:
    """(messages, elements) of a member that sends ``counts[j]`` to member j: reduce_scatter and alltoall."""
    others = [c for j, c in enumerate(counts) if j != place and c]
    return len(others), sum(others)


def sent_allgather(own: int, members: int) -> tuple[int, int]:
    """(messages, elements) of a member that sends its ``own`` elements to all others."""
    return (members - 1 if own else 0), own * (members - 1)


def sent_exchange(sends: Mapping[int, Array], rank: int) -> tuple[int, int]:
    """(messages, elements) of a rank in an exchange."""
    sizes = [a.size for r, a in sends.items() if r != rank and a.size]
    return len(sizes), sum(sizes)


def reduce_into(out: np.ndarray, part: np.ndarray, op: Reduction) -> None:
    """``out = op(out, part)`` in place. NaN wins a maximum here; MPI promises nothing about NaN in a maximum."""
    if op == "sum":
        out += part
    else:
        np.maximum(out, part, out=out)
