"""Walking through local blocks in pieces that stay in cache: many simple NumPy passes, one trip to memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lbpar.errors import TrainingError

Array = NDArray[Any]

# Elements per piece. Six float32 operands of this size fit a 1 MiB second-level cache, and a NumPy call's overhead
# (about 0.5 microseconds) stays well below its work (several microseconds).
CHUNK = 16384


def flat(name: str, array: Array) -> Array:
    """One-dimensional view of a block; TrainingError if it is not C-contiguous (an update would be lost)."""
    if not array.flags.c_contiguous:
        raise TrainingError(
            f"{name}: the optimizer was given a block of shape {array.shape} that is not C-contiguous, expected a "
            "C-contiguous array. Pass numpy.ascontiguousarray of it and keep that copy as the parameter."
        )
    return array.reshape(-1)


def chunks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Corresponding pieces (views) of 1-D arrays of equal length; nothing for empty ones."""
    size = arrays[0].size
    if 0 < size <= CHUNK:  # the usual case costs no slicing
        yield arrays
        return
    for start in range(0, size, CHUNK):
        yield tuple(a[start : start + CHUNK] for a in arrays)


class Scratch:
    """Work arrays of one piece, allocated once per dtype and reused by every parameter and step."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Array] = {}

    def get(self, dtype: DTypeLike, size: int, slot: int = 0) -> Array:
        """Uninitialised 1-D array of ``size <= CHUNK`` elements; different ``slot`` numbers never overlap."""
        key = (np.dtype(dtype).str, slot)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = np.empty(CHUNK, dtype)
        return buffer[:size]


def sum_of_squares(array: Array) -> float:
    """Sum of squares of a 1-D array, accumulated in float64 whatever its dtype; 0 for an empty one."""
    total = 0.0
    for (part,) in chunks(array):
        wide = part.astype(np.float64, copy=False)
        total += float(np.dot(wide, wide))
    return total
