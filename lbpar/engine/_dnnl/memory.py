"""Arrays whose memory is reused once nobody refers to them.

Fresh large arrays come from the operating system page by page, zeroed, at a cost near that of the kernel that fills
them; a training step asks for the same sizes again and again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lbpar.engine._dnnl.library import aligned

SMALL = 1 << 16
"""Bytes below which an array is simply allocated: the C library recycles those itself."""

_PAGE = 4096


class _Lease:
    """Owner of one array's memory; gives it back when the last array over it goes away."""

    __slots__ = ("__array_interface__", "pool", "raw")

    def __init__(self, pool: Pool, raw: npt.NDArray[np.uint8], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.pool, self.raw = pool, raw
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (raw.ctypes.data, False),
        }

    def __del__(self) -> None:
        self.pool.put(self.raw)


class Pool:
    """Free blocks by size. A request takes a block of its own size, or one up to an eighth larger.

    Attributes
    ----------
    limit : int or None
        Bytes, in use and free together, beyond which free blocks go back to the operating system before a new one is
        made. None: all blocks are kept, so each size holds what its own peak needed.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.held = 0
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Uninitialised C-contiguous array, aligned to 64 bytes unless it is small; its memory returns here when it and all its views are gone."""
        dtype, shape = np.dtype(dtype), tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL:
            return np.empty(shape, dtype)
        size = -(-nbytes // _PAGE) * _PAGE
        try:
            raw = self._free[size].pop()
        except (KeyError, IndexError):
            raw = self._near(size)
        return np.asarray(_Lease(self, raw, shape, dtype))

    def _near(self, size: int) -> npt.NDArray[np.uint8]:
        """A somewhat larger free block, or a new one."""
        for near in sorted(n for n, blocks in self._free.items() if blocks and size <= n <= size + size // 8):
            try:
                return self._free[near].pop()
            except IndexError:  # another thread took it
                continue
        if self.limit is not None and self.held + size > self.limit:
            self._drop(self.held + size - self.limit)
        self.held += size
        return aligned(size)

    def _drop(self, nbytes: int) -> None:
        for size in sorted(self._free, reverse=True):
            blocks = self._free[size]
            while blocks and nbytes > 0:
                blocks.pop()
                nbytes -= size
                self.held -= size

    def put(self, raw: npt.NDArray[np.uint8]) -> None:
        """Take back a block."""
        self._free.setdefault(raw.nbytes, []).append(raw)

    def free_bytes(self) -> int:
        """Bytes held for reuse."""
        return sum(size * len(blocks) for size, blocks in self._free.items())

    def release(self) -> None:
        """Give all free blocks back to the operating system."""
        self._drop(self.held + 1)
