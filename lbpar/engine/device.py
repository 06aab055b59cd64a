"""Arrays of one device and its queues: what every engine offers beside kernels, and what transports get buffers from.

Streams and events
    A device may be asynchronous: a call may return before its result is there, in the order of one compute queue.
    Results of one call may be passed to the next without waiting. Work outside that queue (a transfer) starts after an
    event recorded behind what it reads, and lets the queue ``wait`` for the event that ends it; it holds on to its
    arrays until then, since memory that nobody refers to is reused in the queue's order. The host
    sees values through ``fetch`` and ``to_host`` alone. On host memory every call has finished when it returns and all
    of this costs nothing.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
"""An array of the device, of any element type: shape, dtype, views by slices and ``reshape``; all else through calls."""

Float64Array: TypeAlias = npt.NDArray[np.float64]

Index: TypeAlias = tuple[Any, ...]
"""One slice or one-dimensional integer array per dimension; arrays select rows of their own dimension (`np.ix_`)."""

Event: TypeAlias = Any
"""An opaque point in a queue; None where nothing needs waiting for."""


class Device(ABC):
    """Arrays, queue and clock of one device.

    Attributes
    ----------
    host : bool
        Arrays are NumPy arrays in host memory, and calls are synchronous.
    stream : opaque
        Handle of the compute queue, for libraries that take one; None on host memory.
    dtype : numpy dtype
        Element type of arrays that are made without one.
    place : str
        Where arrays lie: ranks that say the same share its memory.
    capacity : int or None
        Bytes there; None for memory of the node.
    captures : bool
        Steps are to be recorded (`capture`).
    reserves : bool
        `reserve` has an effect.
    """

    host: ClassVar[bool] = False
    stream: Any = None
    dtype: np.dtype[Any]
    place: str
    capacity: int | None = None
    captures = False
    reserves = False

    def reserve(self, nbytes: int) -> None:  # noqa: B027 - it is a wish
        """Take memory for so many bytes of arrays, those that there are included, in one stretch, of which arrays are then pieces."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike | None = None) -> Array:
        """An uninitialised C-contiguous array."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike | None = None) -> Array:
        """A C-contiguous array of zeros."""

    @abstractmethod
    def copy(self, a: Array, dtype: npt.DTypeLike | None = None, out: Array | None = None) -> Array:
        """C-contiguous copy of ``a``, of another element type if one is given; or copied into ``out`` of a's shape."""

    @abstractmethod
    def pack(self, a: Array, index: Index, out: Array | None = None) -> Array:
        """C-contiguous copy of the selected part of a, with as many dimensions as a.

        Parameters
        ----------
        a : any shape
        index : one slice (any step above 0) or one-dimensional integer array per dimension
            The selection is the outer product over dimensions, as with `np.ix_`.
        out : one-dimensional and contiguous, of the part's size, optional
            Written, in C order, and returned instead.
        """

    @abstractmethod
    def unpack(self, buf: Array, a: Array, index: Index, accumulate: bool = False) -> None:
        """Store ``buf`` (any shape of the right size, C order) in the selected part of ``a``, or add it there.

        index is as for `pack`. Where it names an element twice, accumulate adds both; a store keeps either.
        """

    def pack_all(self, a: Array, parts: Sequence[tuple[Index, Array]]) -> None:
        """`pack` several parts of a, each into its ``out``."""
        for index, out in parts:
            self.pack(a, index, out)

    def unpack_all(self, parts: Sequence[tuple[Array, Index]], a: Array) -> None:
        """`unpack` several arrays into parts of a that do not overlap."""
        for buf, index in parts:
            self.unpack(buf, a, index)

    @abstractmethod
    def from_host(self, a: npt.NDArray[Any]) -> Array:
        """C-contiguous ``a`` on the device; on host memory ``a`` itself if it is contiguous.

        The device holds on to ``a`` until it is copied; it must not be changed any more.
        """

    @abstractmethod
    def fetch(self, a: Array) -> Callable[[], npt.NDArray[Any]]:
        """Start copying a to the host. The call that is returned waits for that copy alone and gives a NumPy array, which
        may be ``a`` itself."""

    def to_host(self, a: Array) -> npt.NDArray[Any]:
        """NumPy array with a's values (blocks)."""
        return self.fetch(a)()

    def buffer(self, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """One-dimensional memory of the host for `copy_out` and `copy_in`."""
        return np.empty(size, dtype)

    def copy_out(self, a: Array, buffer: npt.NDArray[Any], after: Event) -> Callable[[], None]:
        """Start copying a (one-dimensional) to memory of the host, once ``after`` has happened; the call waits for that copy."""
        fetch = self.fetch(a)
        return lambda: np.copyto(buffer, fetch())

    def copy_in(self, buffer: npt.NDArray[Any], out: Array) -> Event:
        """Start copying a `buffer` to ``out``, beside the compute queue; returns the event that ends it."""
        self.copy(self.from_host(buffer), out=out)

    def release(self, buffer: npt.NDArray[Any], after: Event = None) -> None:  # noqa: B027  NumPy frees its memory itself
        """Give back what `buffer` gave, once ``after`` has happened."""

    @abstractmethod
    def record(self) -> Event:
        """An event that happens once everything queued so far has run."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let whatever is queued from now on run only after the event; does not block the host."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until everything queued so far has run."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what ``run`` would do in the compute queue, none of which is done. The call that is returned does it all, in the same memory.

        Arrays that ``run`` makes and leaves are written each time. Those that it finds must stay, but for what it lets go itself.

        Raises
        ------
        EngineError
            ``run`` needs something of the host; what it has made until then holds nothing.
        """
        raise NotImplementedError

    def drop_captures(self) -> None:  # noqa: B027  most devices have none
        """Let go of all that was recorded, which nobody launches any more."""

    @abstractmethod
    def mark(self) -> Any:
        """The time at which everything queued so far has run, for `elapsed`."""

    @abstractmethod
    def elapsed(self, start: Any, end: Any) -> float:
        """Seconds between two marks; blocks until both have happened."""


class Host(Device):
    """NumPy arrays in host memory: everything has happened when a call returns."""

    host = True
    place = platform.node()

    def __init__(self, dtype: npt.DTypeLike = np.float32) -> None:
        self.dtype = np.dtype(dtype)

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike | None = None) -> Array:
        return np.empty(tuple(shape), dtype=self.dtype if dtype is None else dtype)

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike | None = None) -> Array:
        out = self.empty(shape, dtype)  # which a derived class may take from memory that it reuses
        out.fill(0)
        return out

    def copy(self, a: Array, dtype: npt.DTypeLike | None = None, out: Array | None = None) -> Array:
        if out is None:
            out = self.empty(a.shape, a.dtype if dtype is None else dtype)
        np.copyto(out, a, casting="unsafe")
        return out

    def pack(self, a: Array, index: Index, out: Array | None = None) -> Array:
        part = a[_outer(index, a.shape)]
        target = self.empty(part.shape, a.dtype) if out is None else out.reshape(part.shape)
        np.copyto(target, part)
        return target if out is None else out

    def unpack(self, buf: Array, a: Array, index: Index, accumulate: bool = False) -> None:
        where = _outer(index, a.shape)
        values = buf.reshape(a[where].shape)
        if not accumulate:
            a[where] = values
        elif any(not isinstance(i, slice) for i in index):
            np.add.at(a, where, values)  # unlike +=, adds every one of repeated rows
        else:
            a[where] += values

    def from_host(self, a: npt.NDArray[Any]) -> Array:
        return np.asarray(a, order="C")

    def fetch(self, a: Array) -> Callable[[], npt.NDArray[Any]]:
        return lambda: a

    def record(self) -> Event:
        return None

    def wait(self, event: Event) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def mark(self) -> float:
        return perf_counter()

    def elapsed(self, start: float, end: float) -> float:
        return end - start


HOST = Host()
"""For code that has no engine."""


def _outer(index: Index, shape: Sequence[int]) -> Index:
    """``index`` for NumPy, so that arrays of several dimensions select an outer product instead of pairs."""
    if sum(not isinstance(i, slice) for i in index) < 2:
        return tuple(index)
    return np.ix_(*(np.arange(n)[i] if isinstance(i, slice) else i for i, n in zip(index, shape, strict=True)))
