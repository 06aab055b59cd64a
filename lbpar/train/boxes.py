"""Boxes of global tensors as checkpoints use them: per dimension, the runs of indices that a block holds.

A block of a tensor is a box: ``((lo, hi), ...)`` per dimension, half-open, increasing, not overlapping. The block's
array lies dense in memory, runs one after the other. A tensor without dimensions has the box ``()``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from math import prod

Run = tuple[int, int]
Box = tuple[tuple[Run, ...], ...]
Slices = tuple[slice, ...]


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple(((0, n),) for n in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Shape of the block's array."""
    return tuple(sum(hi - lo for lo, hi in runs) for runs in box)


def box_size(box: Box) -> int:
    """Number of elements of the block."""
    return prod(box_shape(box))


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
    """Pairs (slices of the global tensor, slices of the block's array), one for each combination of nonempty runs."""
    per_dim = []
    for runs in box:
        offsets = accumulate((hi - lo for lo, hi in runs), initial=0)
        per_dim.append(
            [(slice(lo, hi), slice(at, at + hi - lo)) for (lo, hi), at in zip(runs, offsets, strict=False) if hi > lo]
        )
    for pairs in product(*per_dim):
        yield tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
