"""What a halo is not needed for: the outputs of a window that read only what a rank holds by itself, and the rims around them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np

from lbpar.layout.layout import Dim, blocks
from lbpar.layout.runs import Many
from lbpar.layout.transition import Move

Side = tuple[int, int]
"""First output, and one past the last, along a dimension."""


def _inner(ghosted: Dim, block: tuple[Many, Many], held: tuple[Many, Many]) -> tuple[Many, Many]:
    """Of a block of outputs those whose window lies in what is held, or outside of the tensor; numbers or arrays."""
    w, (lo, hi), (first, last) = ghosted.window, block, held
    assert w is not None
    if ghosted.transposed:
        start, stop = (first - 1) * w.stride + w.reach - w.pad + 1, last * w.stride - w.pad
    else:
        start, stop = -(-(first + w.pad) // w.stride), (last - 1 - w.reach + w.pad) // w.stride + 1
    start = np.where(first > 0, np.clip(start, lo, hi), lo)
    return start, np.where(last < ghosted.extent, np.clip(stop, start, hi), hi)


@lru_cache(maxsize=1 << 14)
def interior(halo: Move, rank: int) -> tuple[Side | None, ...]:
    """Of the outputs that read the array that a halo exchange completes, those that a rank can compute before.

    Parameters
    ----------
    halo : Move
        From blocks to blocks with ghosts.
    rank : int

    Returns
    -------
    sides : per dimension of the array that is read
        Global indices; they may be empty. None where that dimension has no ghosts, and all outputs can be computed.
    """
    grid = halo.src.grid
    coords = grid.coords(rank)
    found: list[Side | None] = []
    for src, dst in zip(halo.src.dims, halo.dst.dims, strict=True):
        if dst.window is None:
            found.append(None)
            continue
        (held,) = src.runs(grid, coords) or ((0, 0),)
        start, stop = _inner(dst, dst.parts(grid, coords)[0], held)
        found.append((int(start), int(stop)))
    return tuple(found)


@lru_cache(maxsize=1 << 12)
def interior_share(halo: Move) -> float:
    """Part of the outputs that belongs to the interior on the ranks with the largest blocks."""
    share = 1.0
    for src, dst in zip(halo.src.dims, halo.dst.dims, strict=True):
        if dst.window is None:
            continue
        block = blocks(Dim(dst.factors[0], dst.factors, dst.axes), halo.src.grid)
        first, last = blocks(src, halo.src.grid)
        start, stop = _inner(dst, block, (first * (last > first), last * (last > first)))
        size = block[1] - block[0]
        share *= float((stop - start)[size == size.max()].min() / max(1, size.max()))
    return share


def rims(inner: Sequence[Side], whole: Sequence[Side]) -> list[tuple[Side, ...]]:
    """Boxes that together with the box ``inner`` make up the box ``whole``; no two of them overlap, and none is empty."""
    if any(stop <= start for start, stop in inner):
        return [tuple(whole)] if prod(stop - start for start, stop in whole) else []
    found: list[tuple[Side, ...]] = []
    for axis, ((start, stop), (lo, hi)) in enumerate(zip(inner, whole, strict=True)):
        for part in ((lo, start), (stop, hi)):
            if part[1] > part[0]:
                found.append((*inner[:axis], part, *whole[axis + 1 :]))
    return [box for box in found if all(stop > start for start, stop in box)]
