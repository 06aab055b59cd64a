"""Whole tensors, or parts of them, out of the ranks' blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lbpar.layout.layout import Layout
from lbpar.layout.runs import indices
from lbpar.transport.base import Transport

Array = Any


def gather(layout: Layout, block: Array, transport: Transport) -> Array:
    """The whole tensor of which every rank holds a block, on all ranks. Collective over all ranks.

    Parameters
    ----------
    layout : Layout
        Partial values are summed.
    block : array
        This rank's.
    """
    with transport.counter.paused():
        blocks = transport.allgather_obj(block)
    return _joined(layout, blocks, [(0, n) for n in layout.shape])


def gather_part(layout: Layout, block: Array, transport: Transport, where: Sequence[slice]) -> Array | None:
    """A part of such a tensor on rank 0, None elsewhere; no rank sends more than it holds of it. Collective over all ranks.

    Parameters
    ----------
    layout, block, transport
        As for `gather`.
    where : sequence of slice
        Of the first dimensions.
    """
    ends = [slice(*w.indices(n)) for w, n in zip(where, layout.shape, strict=False)]
    bounds = [*((e.start, e.stop) for e in ends), *((0, n) for n in layout.shape[len(ends) :])]
    own = [
        np.flatnonzero((i >= lo) & (i < hi))
        for i, (lo, hi) in zip(map(indices, layout.box(transport.rank)), bounds, strict=True)
    ]
    with transport.counter.paused():
        parts = transport.gather(block[np.ix_(*own)] if _speaks(layout, transport.rank) else block[:0])
    return None if parts is None else _joined(layout, parts, bounds)


def _speaks(layout: Layout, rank: int) -> bool:
    """Whether a rank is the first of those that hold the same."""
    own = {*layout.shard_axes, *layout.partial}
    return all(c == 0 for a, c in enumerate(layout.grid.coords(rank)) if a not in own)


def _joined(layout: Layout, parts: Sequence[Array], bounds: Sequence[tuple[int, int]]) -> Array:
    """The box inside bounds, out of what each rank holds of it."""
    out = np.zeros([hi - lo for lo, hi in bounds], parts[0].dtype)
    for rank, part in enumerate(parts):
        if part.size and _speaks(layout, rank):
            held = map(indices, layout.box(rank))
            out[np.ix_(*(i[(i >= lo) & (i < hi)] - lo for i, (lo, hi) in zip(held, bounds, strict=True)))] += part
    return out
