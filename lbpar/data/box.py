"""What reading adds to boxes (`lbpar.layout.runs`): a check against a sample's shape, and plain slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import DataError
from lbpar.layout.runs import Box, Runs, indices


def middle(shape: Sequence[int], most: int) -> Box:
    """A box of at most ``most`` elements around the middle of a shape, as few rows of memory as possible."""
    box = []
    for d, extent in enumerate(shape):
        take = min(extent, max(1, most // prod(shape[d + 1 :])))
        first = (extent - take) // 2
        box.append(((first, first + take),))
        most //= take
    return tuple(box)


def touched(chunks: Sequence[int], shape: Sequence[int], box: Box) -> int:
    """Elements of the chunks of one sample that hold a box of it.

    Parameters
    ----------
    chunks : (samples, ...)
    shape : (...)
        Of a sample.
    box : Box
    """
    return prod(
        len({i // c for i in indices(runs).tolist()}) * min(c, e)
        for runs, c, e in zip(box, chunks[1:], shape, strict=True)
    )


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


def to_runs(sorted_indices: NDArray[np.int64]) -> Runs:
    """Return increasing indices as maximal runs of neighbours."""
    if not len(sorted_indices):
        return ()
    cuts = np.flatnonzero(np.diff(sorted_indices) != 1) + 1
    return tuple((int(part[0]), int(part[-1]) + 1) for part in np.split(sorted_indices, cuts))


def pieces(box: Box) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield (slices of the whole, slices of the block) for every combination of runs, none empty; a block holds its runs dense."""
    per_dim = []
    for runs in box:
        at, dim = 0, []
        for lo, hi in runs:
            if hi > lo:
                dim.append((slice(lo, hi), slice(at, at + hi - lo)))
            at += hi - lo
        per_dim.append(dim)
    for combination in product(*per_dim):
        yield tuple(c[0] for c in combination), tuple(c[1] for c in combination)
