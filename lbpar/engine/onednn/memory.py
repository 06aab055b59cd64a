"""Arrays whose memory is reused once nobody refers to them.

Fresh large arrays come from the operating system page by page, zeroed, at a cost near that of the kernel that fills
them; a training step asks for the same sizes again and again. All arrays lie in one arena, whose free pieces are joined,
so that its size stays near the most that is alive at once.
"""

from __future__ import annotations

import math
import mmap
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

SMALL = 1 << 16
"""Bytes below which an array is simply allocated: the C library recycles those itself."""

CHUNK = 16 << 30
"""Bytes of address space reserved at a time; memory is used only as arrays fill it."""

_PAGE = 4096

_STAGGER = 320
# Arrays that start at the same place within a page get into each other's way in caches: each is a little longer.

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class _Chunk:
    """A stretch of address space: [0, used) is in use or free, what lies behind was never touched."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.map = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel built without huge pages, which save faults and address look-ups
                self.map.madvise(mmap.MADV_HUGEPAGE)
        self.address: int = np.frombuffer(self.map, np.uint8).ctypes.data
        self.used = 0
        self.starts: list[int] = []  # of the free pieces, in order
        self.sizes: list[int] = []

    def take(self, size: int) -> int | None:
        """Start of a piece: from the smallest free one that is large enough, else from behind; None where all is full."""
        best, least = -1, self.size + 1
        for i, free in enumerate(self.sizes):
            if size <= free < least:
                best, least = i, free
        if best >= 0:
            start = self.starts[best]
            if least == size:
                del self.starts[best], self.sizes[best]
            else:
                self.starts[best] += size
                self.sizes[best] -= size
            return start
        start = self.used
        if self.starts and self.starts[-1] + self.sizes[-1] == self.used:
            start = self.starts[-1]
        if start + size > self.size:
            return None
        if start < self.used:
            del self.starts[-1], self.sizes[-1]
        self.used = start + size
        return start

    def give(self, start: int, size: int) -> None:
        """Take back a piece, and join it with free neighbours."""
        starts, sizes = self.starts, self.sizes
        i = bisect_left(starts, start)
        if i < len(starts) and start + size == starts[i]:
            size += sizes[i]
            del starts[i], sizes[i]
        if i > 0 and starts[i - 1] + sizes[i - 1] == start:
            sizes[i - 1] += size
        else:
            starts.insert(i, start)
            sizes.insert(i, size)

    def release(self) -> None:
        """Give the pages of free pieces back to the operating system."""
        for start, size in zip(self.starts, self.sizes, strict=True):
            first, last = -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE
            if last > first:
                self.map.madvise(mmap.MADV_DONTNEED, first, last - first)


class _Lease:
    """Owner of one array's memory; gives it back when the last array over it goes away."""

    __slots__ = ("__array_interface__", "piece", "returned")

    def __init__(
        self, returned: deque[Any], piece: tuple[_Chunk, int, int], shape: tuple[int, ...], typestr: str
    ) -> None:
        self.returned, self.piece = returned, piece
        address = piece[0].address + piece[1]
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": typestr, "data": (address, False)}

    def __del__(self) -> None:
        self.returned.append(self.piece)


class Arena:
    """Hands out arrays of one arena.

    Any thread may ask for an array and drop one. Memory that comes back is noted and joined at the next request: it may
    come back at any moment, in the middle of another request too.
    """

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._returned: deque[tuple[_Chunk, int, int]] = deque()
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Bytes in use and free together: the most that was ever needed at once."""
        return sum(c.used for c in self._chunks)

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Uninitialised C-contiguous array, aligned to 64 bytes unless it is small; its memory returns here when it and all
        its views are gone."""
        dtype, shape = np.dtype(dtype), tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL:
            return np.empty(shape, dtype)
        size = -(-nbytes // _PAGE) * _PAGE + _STAGGER
        with self._lock:
            piece = self._take(size)
        return np.asarray(_Lease(self._returned, piece, shape, dtype.str))

    def _take(self, size: int) -> tuple[_Chunk, int, int]:
        self._collect()
        for chunk in self._chunks:
            start = chunk.take(size)
            if start is not None:
                return chunk, start, size
        chunk = _reserve(size)
        self._chunks.append(chunk)
        start = chunk.take(size)
        assert start is not None
        return chunk, start, size

    def _collect(self) -> None:
        returned = self._returned
        while returned:
            chunk, start, size = returned.popleft()
            chunk.give(start, size)

    def free_bytes(self) -> int:
        """Bytes held for reuse."""
        with self._lock:
            self._collect()
            return sum(sum(c.sizes) for c in self._chunks)

    def release(self) -> None:
        """Give the pages of all free memory back to the operating system."""
        with self._lock:
            self._collect()
            for chunk in self._chunks:
                chunk.release()


def _reserve(size: int) -> _Chunk:
    """A new chunk, smaller where the system does not allow so much address space."""
    want = max(CHUNK, size)
    while True:
        try:
            return _Chunk(want)
        except OSError:
            if want == size:
                raise MemoryError(f"no memory for an array of {size} bytes") from None
            want = max(size, want // 4)
