"""Boxes: which part of each sample a rank reads, as runs of indices per dimension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import DataError

Run: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[tuple[Run, ...], ...]
"""Per dimension of a sample, without the batch: increasing, disjoint runs (lo, hi), hi excluded; () selects nothing."""


def whole(shape: Sequence[int]) -> Box:
    """Return the box of everything."""
    return tuple(((0, e),) for e in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of what a box selects."""
    return tuple(sum(hi - lo for lo, hi in runs) for runs in box)


def check_box(box: Box, shape: Sequence[int], where: str) -> None:
    """Refuse a box that does not fit into a sample.

    Raises
    ------
    DataError
        Wrong number of dimensions, runs out of order or outside the shape.
    """
    if len(box) != len(shape):
        raise DataError(
            f"{where}: got a box of {len(box)} dimensions, expected {len(shape)} for samples {tuple(shape)}."
        )
    for d, (runs, extent) in enumerate(zip(box, shape, strict=True)):
        ends = [e for run in runs for e in run]
        if any(a > b for a, b in pairwise([0, *ends, extent])):
            raise DataError(f"{where}: got runs {runs} in dimension {d}, expected increasing runs inside 0..{extent}.")


def indices(runs: Sequence[Run]) -> NDArray[np.int64]:
    """Return the indices that runs select, in order."""
    return np.concatenate([np.arange(lo, hi, dtype=np.int64) for lo, hi in runs] or [np.empty(0, np.int64)])


def to_runs(sorted_indices: NDArray[np.int64]) -> list[Run]:
    """Return increasing indices as maximal runs of neighbours."""
    if not len(sorted_indices):
        return []
    cuts = np.flatnonzero(np.diff(sorted_indices) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(sorted_indices, cuts)]


def pieces(box: Box) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield (slices of the sample, slices of the result) for every combination of runs."""
    per_dim = []
    for runs in box:
        at, dim = 0, []
        for lo, hi in runs:
            dim.append((slice(lo, hi), slice(at, at + hi - lo)))
            at += hi - lo
        per_dim.append(dim)
    for combination in product(*per_dim):
        yield tuple(c[0] for c in combination), tuple(c[1] for c in combination)
