"""Arrays whose memory is reused once nobody refers to them.

Fresh large arrays come from the operating system page by page, zeroed, at a cost near that of the kernel that fills
them; a training step asks for the same sizes again and again. All arrays lie in one arena, whose free pieces are joined,
so that its size stays near the most that is alive at once.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from lbpar.pieces import PAGE, SMALL, Pieces, piece_size

CHUNK = 16 << 30
"""Bytes of address space reserved at a time; memory is used only as arrays fill it."""

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class _Chunk(Pieces):
    """A stretch of address space."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.map = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel built without huge pages, which save faults and address look-ups
                self.map.madvise(mmap.MADV_HUGEPAGE)
        self.address: int = np.frombuffer(self.map, np.uint8).ctypes.data

    def release(self) -> None:
        """Give the pages of free pieces back to the operating system."""
        for start, size in zip(self.starts, self.sizes, strict=True):
            first, last = -(-start // PAGE) * PAGE, (start + size) // PAGE * PAGE
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
        size = piece_size(nbytes)
        with self._lock:
            piece = self._take(size)
        if dtype.kind == "V":  # a type that is none of NumPy's own, which only a view knows
            return np.asarray(_Lease(self._returned, piece, shape, "<u2")).view(dtype)
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
