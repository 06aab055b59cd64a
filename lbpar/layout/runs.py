"""Index sets of one tensor dimension, as sorted disjoint runs [lo, hi), and the one block rule."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from lbpar.errors import LayoutError
from lbpar.random import outer_sum

MOST_RUNS = 2**17
Runs = tuple[tuple[int, int], ...]
Box = tuple[Runs, ...]
#: A number, or an array of numbers.
Many = Any


def block(lo: Many, hi: Many, parts: int, index: Many) -> tuple[Many, Many]:
    """Part ``index`` of [lo, hi) cut into ``parts``: the first parts are one larger where it does not divide. Numbers or arrays.

    >>> [block(0, 7, 3, i) for i in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    q, r = divmod(hi - lo, parts)
    start = lo + index * q + r + (index - r) * (index < r)
    return start, start + q + (index < r)


def run(lo: int, hi: int) -> Runs:
    """One run, or none if it is empty."""
    return ((lo, hi),) if hi > lo else ()


def length(runs: Runs) -> int:
    """Number of indices."""
    return sum(hi - lo for lo, hi in runs)


def intersect(a: Runs, b: Runs) -> Runs:
    """Indices in both sets."""
    if len(a) == 1 and len(b) == 1:
        return run(max(a[0][0], b[0][0]), min(a[0][1], b[0][1]))
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        lo, hi = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if lo < hi:
            out.append((lo, hi))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


def expand(parts: Sequence[tuple[int, int]], extents: Sequence[int]) -> Runs:
    """Flat indices of the box ``parts`` in a row-major index space with the given extents.

    >>> expand([(0, 2), (1, 3)], [2, 4])
    ((1, 3), (5, 7))
    """
    runs, stride = run(0, 1), 1
    for (lo, hi), extent in zip(reversed(parts), reversed(extents), strict=True):
        if lo == 0 and hi == extent and runs == run(0, stride):
            stride *= extent
            runs = run(0, stride)
            continue
        if runs == run(0, stride):
            runs = run(lo * stride, hi * stride)
        else:
            if (hi - lo) * len(runs) > MOST_RUNS:
                raise LayoutError(
                    f"a block of a flattened dimension ({' x '.join(map(str, extents))}) would consist of {(hi - lo) * len(runs)} "
                    f"pieces, expected at most {MOST_RUNS}; split samples or the first spatial dimension only."
                )
            runs = tuple((i * stride + a, i * stride + b) for i in range(lo, hi) for a, b in runs)
        stride *= extent
    return runs


def positions(part: Runs, whole: Runs) -> slice | np.ndarray:
    """Where the indices ``part`` lie in an array that holds the indices ``whole``; a slice where they are adjacent."""
    offset, found = 0, []
    k = 0
    for lo, hi in whole:
        while k < len(part) and part[k][1] <= hi:
            if part[k][0] < lo:
                break
            found.append((part[k][0] - lo + offset, part[k][1] - lo + offset))
            k += 1
        offset += hi - lo
    if k != len(part):  # a part may span several adjacent runs of the whole
        table = indices(whole)
        return np.searchsorted(table, indices(part))
    merged: list[tuple[int, int]] = []
    for lo, hi in found:
        if merged and merged[-1][1] == lo:
            merged[-1] = (merged[-1][0], hi)
        else:
            merged.append((lo, hi))
    if not merged:
        return slice(0, 0)
    if len(merged) == 1:
        return slice(*merged[0])
    return np.concatenate([np.arange(lo, hi) for lo, hi in merged])


def indices(runs: Runs) -> np.ndarray:
    """All indices of a set, as an int64 array."""
    if not runs:
        return np.empty(0, np.int64)
    return np.concatenate([np.arange(lo, hi, dtype=np.int64) for lo, hi in runs])


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple(((0, n),) for n in shape)


def box_size(box: Box) -> int:
    """Number of elements of a box."""
    n = 1
    for r in box:
        n *= length(r)
    return n


def box_shape(box: Box) -> tuple[int, ...]:
    """Shape of the array that holds a box."""
    return tuple(length(r) for r in box)


def box_intersect(a: Box, b: Box) -> Box:
    """Elements in both boxes."""
    if len(a) != len(b):  # one is empty, the other that of a tensor without dimensions
        return ((),)
    return tuple(intersect(p, q) for p, q in zip(a, b, strict=True))


def index_parts(box: Box, shape: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Per dimension, what each place of a box adds to the row-major index of its elements in the whole tensor."""
    return tuple(indices(runs) * prod(shape[d + 1 :]) for d, runs in enumerate(box))


def flat_index(box: Box, shape: Sequence[int]) -> np.ndarray:
    """Row-major index, in the whole tensor, of every element of a box, in the box's shape."""
    return outer_sum(index_parts(box, shape))
