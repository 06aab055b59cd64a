"""Arrays of the device, its pool, pinned memory of the host."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from tests.util.fake_cupy.machine import ALIGNMENT, GUARD, Block, CUDARuntimeError, machine
from tests.util.fake_cupy.streams import Stream, current
from tests.util.queues import poison


class Memory:
    """Memory of the device, given back when nobody refers to it any more."""

    def __init__(self, size: int) -> None:
        self._machine = machine()
        try:
            self.block = self._machine.block(size, "device")
        except MemoryError:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory") from None
        self.ptr, self.size = self.block.address, size

    def __del__(self) -> None:
        if hasattr(self, "ptr"):
            self._machine.free(self.ptr)


class PooledMemory:
    """A block while somebody refers to it. Then it is poisoned in the order of its stream, and used again."""

    def __init__(self, block: Block, pool: MemoryPool, stream: Stream) -> None:
        self.block, self._pool, self._stream = block, pool, stream
        self.ptr, self.size = block.address, block.nbytes
        self._recording = stream.recording
        if self._recording is not None:  # each time that it is launched, it finds memory that others may have had
            stream.queue.put(lambda: poison(block.data))

    def __del__(self) -> None:
        block, used, stream = self.block, self.block.used, self._stream
        mine = self._recording is not None and self._recording is stream.recording
        queue = (
            stream.queue if mine else stream.always
        )  # memory from before a capture is let go now, and not in each launch
        # What a recording leaves behind others that are launched meanwhile may write over, farther than it did.
        queue.put((lambda: block.clear(used)) if mine or self._recording is None else (lambda: poison(block.data)))
        self._pool.returned.append((block, stream))


class MemoryPointer:
    """An address in some memory, which it keeps."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, 0

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def __int__(self) -> int:
        return self.ptr


class MemoryPool:
    """Chunks that are used again by the stream that had them: the smallest that is large enough, cut to size; free neighbours are joined.

    Where memory is short, what is free and in one piece is given back first.
    """

    def __init__(self, allocator: Any = None) -> None:
        self._allocator = allocator or (lambda size: MemoryPointer(Memory(size), 0))
        self._memory: dict[int, Memory] = {}
        self._free: dict[int, list[Block]] = {}
        self.returned = deque[tuple[Block, Stream]]()  # at any moment
        self._total = 0

    def malloc(self, nbytes: int) -> MemoryPointer:
        stream = current()
        self._collect()
        size = -(-(nbytes + GUARD) // ALIGNMENT) * ALIGNMENT - GUARD
        fits = [b for b in self._free.get(stream.ptr, []) if b.nbytes >= size]
        block = min(fits, key=lambda b: b.nbytes) if fits else self._new(size)
        if fits:
            self._free[stream.ptr].remove(block)
            if block.nbytes >= size + ALIGNMENT:
                block, rest = machine().cut(block, size)
                self._free[stream.ptr].append(rest)
        block.used = nbytes
        return MemoryPointer(PooledMemory(block, self, stream), 0)

    def _collect(self) -> None:
        while self.returned:
            block, stream = self.returned.popleft()
            free = self._free.setdefault(stream.ptr, [])
            for other in [b for b in free if b.whole is block.whole]:
                if block.end == other.address or other.end == block.address:
                    free.remove(other)
                    block = machine().joined(*sorted((other, block), key=lambda b: b.address))
            free.append(block)

    def _new(self, size: int) -> Block:
        from tests.util.fake_cupy.cuda import memory

        for _ in range(2):
            try:
                taken = self._allocator(size).mem
            except CUDARuntimeError:
                self.free_all_blocks()
                continue
            self._total += size + GUARD
            self._memory[id(taken.block.whole)] = taken
            found: Block = taken.block
            return found
        raise memory.OutOfMemoryError(size, self._total)

    def free_all_blocks(self) -> None:
        """Let go of memory that is free and in one piece."""
        self._collect()
        for blocks in self._free.values():
            for block in [b for b in blocks if b.nbytes == self._memory[id(b.whole)].size]:
                blocks.remove(block)
                self._total -= block.nbytes + GUARD
                del self._memory[id(block.whole)]

    def used_bytes(self) -> int:
        return self._total - self.free_bytes()

    def free_bytes(self) -> int:
        self._collect()
        return sum(b.end - b.address for blocks in self._free.values() for b in blocks)

    def total_bytes(self) -> int:
        return self._total


def alloc_pinned_memory(nbytes: int) -> Any:
    """Memory of the host that the device reads late. It belongs to somebody else as soon as it is let go."""
    block = machine().block(nbytes, "pinned")

    class PinnedMemoryPointer(ctypes.c_ubyte * nbytes):  # type: ignore[misc]
        ptr = block.address

        def __del__(self) -> None:
            block.clear(nbytes)

    return PinnedMemoryPointer.from_buffer(block.data)


class ndarray:
    """An array of the device. The host knows its shape, and nothing that is in it."""

    __array_ufunc__ = None

    def __init__(
        self,
        shape: Sequence[int] | int,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: Any = None,
        order: str = "C",
    ) -> None:
        assert memptr is not None, "memory of the default pool"
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        start = memptr.ptr - memptr.mem.ptr
        self._set(np.ndarray(shape, dtype, memptr.mem.block.data, start, strides), memptr.mem)

    def _set(self, raw: np.ndarray, mem: PooledMemory) -> ndarray:
        self._raw, self._mem = raw, mem
        self.shape, self.dtype, self.size, self.ndim = raw.shape, raw.dtype, raw.size, raw.ndim
        self.nbytes, self.itemsize, self.strides, self.flags = raw.nbytes, raw.itemsize, raw.strides, raw.flags
        return self

    @property
    def data(self) -> MemoryPointer:
        return MemoryPointer(self._mem, self._raw.ctypes.data - self._mem.ptr)

    def _view(self, raw: np.ndarray) -> ndarray:
        assert not raw.size or np.may_share_memory(raw, self._raw), "CuPy would copy, in whatever stream is current"
        return ndarray.__new__(ndarray)._set(raw, self._mem)

    def __getitem__(self, index: Any) -> ndarray:
        return self._view(self._raw[(*index, ...) if isinstance(index, tuple) else (index, ...)])

    def reshape(self, *shape: Any) -> ndarray:
        return self._view(self._raw.reshape(*shape))

    def view(self, dtype: Any) -> ndarray:
        return self._view(self._raw.view(dtype))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.kind not in "?iufc":
            raise AttributeError(f"no array interface for {self.dtype}")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "version": 3,
            "strides": None,
        }

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        stream = stream or current()
        if blocking:
            stream.synchronize()
        return self._raw.copy()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly."
        )

    __array__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = __setitem__ = __eq__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__  # type: ignore[assignment]


def asnumpy(a: ndarray, stream: Any = None) -> np.ndarray:
    """A copy on the host."""
    return a.get(stream)
