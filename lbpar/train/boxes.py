"""How a box of a tensor (see `lbpar.layout.runs`) maps to slabs of a file: plain slices on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product

from lbpar.layout.runs import Box

Slices = tuple[slice, ...]


def box_fits(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box is well-formed and lies inside a tensor of that shape."""
    if len(box) != len(shape):
        return False
    for runs, extent in zip(box, shape, strict=True):
        ends = [0, *(bound for run in runs for bound in run), extent]
        if any(a > b for a, b in pairwise(ends)):
            return False
    return True


def slabs(box: Box) -> Iterator[tuple[Slices, Slices]]:
    """Pairs (slices of the global tensor, slices of the block's array) that together cover a box, none empty.

    The block's array holds the runs of each dimension dense, one after the other.
    """
    per_dim = []
    for runs in box:
        offsets = accumulate((hi - lo for lo, hi in runs), initial=0)
        per_dim.append(
            [(slice(lo, hi), slice(at, at + hi - lo)) for (lo, hi), at in zip(runs, offsets, strict=False) if hi > lo]
        )
    for pairs in product(*per_dim):
        yield tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
