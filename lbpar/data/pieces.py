"""Arrays that need not fit into memory, piece by piece: files of arrays, or samples that are made when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
_BYTES = 1 << 24


class Rows:
    """Samples that are made or read a few at a time.

    Parameters
    ----------
    shape : tuple of int, (samples, ...)
    dtype : dtype
    read : callable
        Takes increasing indices, returns those samples.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, read: Callable[[NDArray[np.int64]], Array]) -> None:
        self.shape, self.ndim, self.dtype, self._read = shape, len(shape), np.dtype(dtype), read

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Array:
        return self._read(np.arange(*rows.indices(len(self))))


def cuts(shape: Sequence[int], most: int, whole: bool = False) -> Iterator[tuple[slice, ...]]:
    """Yield slices of the first one or two dimensions that cover an array in order, of about ``most`` elements each.

    Parameters
    ----------
    shape : sequence of int
    most : int
    whole : bool
        Do not cut samples, the second dimension.
    """
    rows = max(1, most // max(1, prod(shape[1:])))
    inner = shape[1] if len(shape) > 1 else 1
    step = inner if whole or prod(shape[1:]) <= most else max(1, most // max(1, prod(shape[2:])))
    for at in range(0, shape[0], rows):
        for lo in range(0, inner, max(1, step)):
            yield (slice(at, at + rows), slice(lo, lo + step))[: len(shape)]


def pieces(source: Any, itemsize: int = 0) -> Iterator[tuple[tuple[slice, ...], Array]]:
    """Yield (where, part) of an array, `Rows`, or anything with a shape, a dtype and slices.

    Parameters
    ----------
    source : array
    itemsize : int, optional
        Bytes that an element will take; default those of the source.
    """
    made = isinstance(source, Rows)  # making half a sample would make it twice
    for where in cuts(source.shape, _BYTES // (itemsize or source.dtype.itemsize), made):
        yield where, np.asarray(source[where[0] if made else where])
