"""Arrays in a device's memory, its compute stream, events, and copies to and from the host."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, finalize

import numpy as np
import numpy.typing as npt

from lbpar.engine.cupy.kernels import THREADS, Kernels, address, kind_of
from lbpar.engine.cupy.library import load, place
from lbpar.engine.cupy.pieces import Box, Launch, dense, moves, rows, sums
from lbpar.engine.cupy.pinned import Pinned
from lbpar.engine.device import Array, Device, Event, Index
from lbpar.errors import EngineError, LbparError
from lbpar.text import human_bytes

log = logging.getLogger(__name__)

LARGEST_ASIDE = 1 << 23
"""Bytes up to which a copy to the host runs beside what the host does; larger ones (checkpoints) are waited for at once."""


FOR_OTHERS = 16
"""Of a device's memory so-manyth a part is left to libraries (CUDA, NCCL, cuDNN, cuBLAS) when arrays take a stretch."""

MOST_UPLOADS = 4096
"""Small arrays of the host that are kept on the device."""


class CupyDevice(Device):
    """CuPy arrays, C-contiguous or views of such.

    All kernels run in one stream of their own. The memory that they take comes from a pool that gives what nobody refers to any
    more to the next who asks, in the order of that stream: whoever else works on an array holds on to it until the stream waits.

    Attributes
    ----------
    cupy : module
    waiting : callable
        Gives the block in which the host waits for the device.
    stream : cupy.cuda.Stream
        Of all kernels. Transfers by way of the host have another one.
    """

    activations: np.dtype[Any]

    def __init__(self) -> None:
        self.cupy = load()
        cuda = self.cupy.cuda
        self._runtime = cuda.runtime
        self.place, (_, self.capacity) = place(self.cupy), self._runtime.memGetInfo()
        self.stream = cuda.Stream(non_blocking=True)
        self._aside = cuda.Stream(non_blocking=True)
        self._pools = self.pool, self._captured = cuda.MemoryPool(), cuda.MemoryPool(_kept(cuda))
        self._capturing, self._recordings = False, WeakSet[_Recording]()
        finalize(self, _drop, self._recordings)  # at the latest when the process ends, before communicators do
        self.pinned = Pinned(cuda.alloc_pinned_memory)
        self.kernels = Kernels(self.cupy, self.stream)
        self._ndarray, self._out_of_memory = self.cupy.ndarray, cuda.memory.OutOfMemoryError
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._uploads: dict[Hashable, tuple[Any, Array]] = {}

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike | None = None) -> Array:
        kind = self.dtype if dtype is None else np.dtype(dtype)
        shape = tuple(shape)
        nbytes = math.prod(shape) * kind.itemsize
        try:
            with self.stream:  # the pool reuses memory in this stream's order
                memory = self.pool.malloc(nbytes)
        except self._out_of_memory as error:
            raise EngineError(self._no_room(nbytes)) from error
        return self._ndarray(shape, kind, memory)

    @property
    def reserves(self) -> bool:  # type: ignore[override]
        return not self.captures  # a recorded step has memory of its own

    def reserve(self, nbytes: int) -> None:
        more, (free, total) = nbytes - self.pool.total_bytes(), self._runtime.memGetInfo()
        if more <= 0:
            return
        with suppress(self._out_of_memory):  # no such stretch, although so much is free
            if more <= free - total // FOR_OTHERS:
                with self.stream:
                    self.pool.malloc(more)  # and given back: the pool cuts arrays from it, and joins what comes back
                return
        log.info("engine: no stretch of %s can be spared on the GPU; arrays take what they find", human_bytes(more))

    def held_bytes(self) -> int:
        """Bytes that this process has taken for arrays."""
        return sum(int(pool.total_bytes()) for pool in self._pools)

    def _no_room(self, nbytes: int) -> str:
        (free, total), used = self._runtime.memGetInfo(), sum(int(pool.used_bytes()) for pool in self._pools)
        return (
            f"memory: an array of {human_bytes(nbytes)} does not fit the GPU: {human_bytes(used)} of its "
            f"{human_bytes(total)} are in use by this process, {human_bytes(free)} are free; use more GPUs and split larger layers, "
            "a smaller batch, or a smaller network."
        )

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike | None = None) -> Array:
        out = self.empty(shape, dtype)
        if out.nbytes:
            self._runtime.memsetAsync(address(out), 0, out.nbytes, self.stream.ptr)
        return out

    def copy(self, a: Array, dtype: npt.DTypeLike | None = None, out: Array | None = None) -> Array:
        if out is None:
            out = self.empty(a.shape, a.dtype if dtype is None else dtype)
        if out.dtype != a.dtype:
            return self._cast(a, out)
        if a.flags.c_contiguous and out.flags.c_contiguous:
            if a.nbytes:
                self._copy(address(out), address(a), a.nbytes, self._runtime.memcpyDeviceToDevice)
        else:
            box = Box(address(out), address(a), a.shape, out.strides, a.strides)
            self._pack(moves([box], a.itemsize))
        return out

    def _cast(self, a: Array, out: Array) -> Array:
        raise NotImplementedError

    def pack(self, a: Array, index: Index, out: Array | None = None) -> Array:
        part = _Part.of(a, index)
        target = self.empty(part.shape, a.dtype) if out is None else out
        box = Box(address(target), part.address, part.shape, dense(part.shape, a.itemsize), part.strides)
        if part.lists is None:
            self._pack(moves([box], a.itemsize))
        else:
            self._pack(rows(box, self._rows(part.lists), False, None, a.itemsize))
        return target

    def unpack(self, buf: Array, a: Array, index: Index, accumulate: bool = False) -> None:
        part, source = _Part.of(a, index), buf if buf.flags.c_contiguous else self.copy(buf)
        box = Box(part.address, address(source), part.shape, part.strides, dense(part.shape, a.itemsize))
        if part.lists is not None:
            self._pack(rows(box, self._rows(part.lists), True, kind_of(a.dtype) if accumulate else None, a.itemsize))
        elif accumulate:
            self._pack(sums([box], kind_of(a.dtype), a.itemsize))
        else:
            self._pack(moves([box], a.itemsize))

    def pack_all(self, a: Array, parts: Sequence[tuple[Index, Array]]) -> None:
        self._move_all([(index, out, True) for index, out in parts], a)

    def unpack_all(self, parts: Sequence[tuple[Array, Index]], a: Array) -> None:
        self._move_all([(index, buf, False) for buf, index in parts], a)

    def _move_all(self, parts: Sequence[tuple[Index, Array, bool]], a: Array) -> None:
        """Copy parts of a out to other arrays, or from there, all in one launch but for those that list rows."""
        boxes = []
        for index, other, out in parts:
            part = _Part.of(a, index)
            if part.lists is not None:
                self.pack(a, index, other) if out else self.unpack(other, a, index)
                continue
            ends = (address(other), dense(part.shape, a.itemsize)), (part.address, part.strides)
            (to, steps), (source, from_steps) = ends if out else ends[::-1]
            boxes.append(Box(to, source, part.shape, steps, from_steps))
        self._pack(moves(boxes, a.itemsize))

    def _pack(self, launches: Iterable[Launch]) -> None:
        for name, blocks, args in launches:
            self.kernels.launch("pack.cu", name, (blocks,), (THREADS,), args)

    def _rows(self, lists: Sequence[npt.NDArray[np.int64] | None]) -> list[int]:
        return [0 if r is None else address(self._upload(r)) for r in lists]

    def from_host(self, a: npt.NDArray[Any]) -> Array:
        self._recorded_not("an array of the host is read")
        out = self.empty(a.shape, a.dtype)
        if out.nbytes:
            piece = self.pinned.take(out.nbytes)
            np.copyto(piece[: out.nbytes].view(a.dtype).reshape(a.shape), a)
            self._copy(address(out), piece.ctypes.data, out.nbytes, self._runtime.memcpyHostToDevice)
            self.pinned.give(piece, self.record())
        return out

    def _upload(self, a: npt.NDArray[Any]) -> Array:
        """A small array of the host that is the same in every step, copied once."""
        return self._uploaded(id(a), a, lambda: np.ascontiguousarray(a))

    def _uploaded(self, key: Hashable, held: Any, make: Callable[[], npt.NDArray[Any]]) -> Array:
        """What ``make`` makes of ``held``, copied once; the key names the identity of what is held."""
        found = self._uploads.get(key)
        if found is None:
            if len(self._uploads) > MOST_UPLOADS:
                self._uploads.clear()
            found = self._uploads[key] = held, self.from_host(make())
        return found[1]

    def fetch(self, a: Array) -> Callable[[], npt.NDArray[Any]]:
        self._recorded_not("the host reads an array")
        kind = (
            np.dtype(np.float32) if a.dtype.itemsize == 2 and a.dtype.kind not in "iu" else a.dtype
        )  # half types are widened
        source = a if a.flags.c_contiguous and kind == a.dtype else self.copy(a, kind)
        out = np.empty(a.shape, kind)
        if not out.nbytes:
            return lambda: out
        if out.nbytes > LARGEST_ASIDE:
            with self.waiting():
                self._copy(out.ctypes.data, address(source), out.nbytes, self._runtime.memcpyDeviceToHost)
                self.stream.synchronize()
            return lambda: out
        return _Fetched(self, source, out)

    def buffer(self, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        nbytes = size * np.dtype(dtype).itemsize
        return self.pinned.take(nbytes)[:nbytes].view(dtype)

    def copy_out(self, a: Array, buffer: npt.NDArray[Any], after: Event) -> Callable[[], None]:
        self._aside.wait_event(after)
        if a.nbytes:
            to, kind = buffer.ctypes.data, self._runtime.memcpyDeviceToHost
            self._runtime.memcpyAsync(to, address(a), a.nbytes, kind, self._aside.ptr)
        event = self._event(self._aside)

        def wait() -> None:
            with self.waiting():
                event.synchronize()

        return wait

    def copy_in(self, buffer: npt.NDArray[Any], out: Array) -> Event:
        self._aside.wait_event(self.record())  # kernels may have used that memory until now
        if out.nbytes:
            source, kind = buffer.ctypes.data, self._runtime.memcpyHostToDevice
            self._runtime.memcpyAsync(address(out), source, out.nbytes, kind, self._aside.ptr)
        return self._event(self._aside)

    def release(self, buffer: npt.NDArray[Any], after: Event = None) -> None:
        assert isinstance(buffer.base, np.ndarray)
        self.pinned.give(buffer.base, after)

    def _copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        self._runtime.memcpyAsync(to, source, nbytes, kind, self.stream.ptr)

    def record(self) -> Event:
        return self._event(self.stream)

    def _event(self, stream: Any) -> Event:
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def wait(self, event: Event) -> None:
        if event is not None:
            self.stream.wait_event(event)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.synchronize()
        self.pool.free_all_blocks()  # which steps took that were not recorded: recorded ones take as much again
        pool, self.pool, self._capturing = self.pool, self._captured, True  # memory that nothing else takes
        try:
            self.stream.begin_capture()
            run()
            # It fails where an error in between was passed over, or the device has no memory for it.
            graph = self.stream.end_capture()
        except BaseException as error:
            with suppress(self._runtime.CUDARuntimeError):
                self.stream.end_capture()
            # CuPy's errors of CUDA's runtime are others than those of its driver, which starts kernels, and cuDNN's are neither.
            if isinstance(error, RuntimeError) and not isinstance(error, LbparError):
                raise EngineError(f"CUDA cannot record it ({error})") from error
            raise
        finally:
            self.pool, self._capturing = pool, False
        recording = _Recording(self, graph, list(self._uploads.values()))  # which may be forgotten meanwhile
        self._recordings.add(recording)
        return recording

    def drop_captures(self) -> None:
        _drop(self._recordings)

    def _recorded_not(self, what: str) -> None:
        if self._capturing:
            raise EngineError(f"{what} in the midst of a step")

    def synchronize(self) -> None:
        self._recorded_not("the host waits")
        with self.waiting():
            self.stream.synchronize()

    def mark(self) -> Any:
        event = self.cupy.cuda.Event()
        event.record(self.stream)
        return event

    def elapsed(self, start: Any, end: Any) -> float:
        with self.waiting():
            start.synchronize()
            end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(start, end)) * 1e-3


def _kept(cuda: Any) -> Callable[[int], Any]:
    """Takes memory for a pool that must not give any back while it lives: recorded steps go on using theirs, whatever array holds it.

    A pool of CuPy's gives back what no array holds when memory is short.
    """
    taken: list[Any] = []

    def allocate(nbytes: int) -> Any:
        taken.append(cuda.Memory(nbytes))
        return cuda.MemoryPointer(taken[-1], 0)

    return allocate


@dataclass(frozen=True)
class _Part:
    """What an index selects: where it begins, its shape and strides, and lists of rows where there are any."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lists: tuple[npt.NDArray[np.int64] | None, ...] | None

    @classmethod
    def of(cls, a: Array, index: Index) -> _Part:
        at, shape, strides = address(a), [], []
        for n, stride, i in zip(a.shape, a.strides, index, strict=True):
            if isinstance(i, slice):
                start, stop, step = i.indices(n)
                shape.append(max(0, -(-(stop - start) // step)))
                strides.append(stride * step)
                at += start * stride
            else:
                shape.append(len(i))
                strides.append(stride)
        lists = tuple(None if isinstance(i, slice) else i for i in index)
        return cls(at, tuple(shape), tuple(strides), lists if any(r is not None for r in lists) else None)


class _Recording:
    """A graph, and what it reads that nobody else may hold."""

    def __init__(self, device: CupyDevice, graph: Any, held: Any) -> None:
        self.graph, self._device, self._held = graph, device, held

    def __call__(self) -> None:
        with self._device.waiting():  # for other ranks, should CUDA take no more launches, or NCCL's calls wait in it
            self.graph.launch(self._device.stream)


def _drop(recordings: Iterable[_Recording]) -> None:
    for recording in list(recordings):
        recording.graph = None


class _Fetched:
    """A copy to the host under way. Its memory there is used again once it has been read, or has ended unread."""

    def __init__(self, device: CupyDevice, source: Array, out: npt.NDArray[Any]) -> None:
        self._pinned, self._waiting, self._out = device.pinned, device.waiting, out
        self._piece: npt.NDArray[np.uint8] | None = device.pinned.take(out.nbytes)
        device._copy(self._piece.ctypes.data, address(source), out.nbytes, device._runtime.memcpyDeviceToHost)
        self._event = device.record()
        # No `__del__`: in garbage that refers to itself CuPy destroys the event as well, before or after, and it would be asked all the same.
        self._unread = finalize(self, device.pinned.give, self._piece, self._event)
        self._unread.atexit = False

    def __call__(self) -> npt.NDArray[Any]:
        if self._piece is not None:
            with self._waiting():
                self._event.synchronize()
            np.copyto(self._out, self._piece[: self._out.nbytes].view(self._out.dtype).reshape(self._out.shape))
            self._unread.detach()
            self._pinned.give(self._piece)
            self._piece = None
        return self._out
