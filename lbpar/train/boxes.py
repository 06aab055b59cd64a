"""How a box of a tensor (see `lbpar.layout.runs`) maps to slabs of a file: plain slices on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product

from lbpar.layout.runs import Box, Runs, length

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


def slabs(box: Box, chunk: Sequence[int] | None = None) -> Iterator[tuple[Slices, Slices]]:
    """Pairs (slices of the global tensor, slices of the block's array) that together cover a box, none empty.

    Parameters
    ----------
    box : Box
        Per dimension, runs of global indices; the block's array holds them dense, one run after the other.
    chunk : sequence of int, optional
        The file's chunk shape. A box with many runs in a late dimension is then walked band by band of chunks, so
        that each chunk is fetched once and not once per run.
    """
    per_dim = []
    for i, runs in enumerate(box):
        if chunk is not None and any(len(later) > 1 for later in box[i + 1 :]):
            runs = _cut(runs, chunk[i])
        offsets = accumulate((hi - lo for lo, hi in runs), initial=0)
        per_dim.append(
            [(slice(lo, hi), slice(at, at + hi - lo)) for (lo, hi), at in zip(runs, offsets, strict=False) if hi > lo]
        )
    for pairs in product(*per_dim):
        yield tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)


def _cut(runs: Runs, step: int) -> Runs:
    """The same indices, runs cut at the multiples of ``step``."""
    cut = []
    for lo, hi in runs:
        bounds = [lo, *range((lo // step + 1) * step, hi, step), hi] if hi > lo else [lo, lo]
        cut += list(pairwise(bounds))
    assert length(tuple(cut)) == length(runs)
    return tuple(cut)
