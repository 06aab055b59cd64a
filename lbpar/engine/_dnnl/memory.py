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
    """Free blocks by size. Sizes are rounded up to steps of at most one eighth, so near sizes share blocks."""

    def __init__(self) -> None:
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Uninitialised C-contiguous array, aligned to 64 bytes; memory returns here when it and all its views are gone."""
        dtype, shape = np.dtype(dtype), tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL:
            return aligned(nbytes)[:nbytes].view(dtype).reshape(shape)
        step = 1 << max(nbytes.bit_length() - 4, 12)
        size = -(-nbytes // step) * step
        try:
            raw = self._free[size].pop()
        except (KeyError, IndexError):
            raw = aligned(size)
        return np.asarray(_Lease(self, raw, shape, dtype))

    def put(self, raw: npt.NDArray[np.uint8]) -> None:
        """Take back a block."""
        self._free.setdefault(raw.nbytes, []).append(raw)

    def free_bytes(self) -> int:
        """Bytes held for reuse."""
        return sum(size * len(blocks) for size, blocks in self._free.items())

    def release(self) -> None:
        """Give all free blocks back to the operating system."""
        self._free.clear()
