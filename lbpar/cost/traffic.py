"""Messages and elements that every rank sends in a move, for any number of ranks at once.

`lbpar.layout.exchange.volume` walks the members of one rank's group. Here the same numbers come from products over
dimensions: a box is a product of index sets, so the elements that a rank sends to all members are the product over
dimensions of the sums over the members' blocks of that dimension. Only coordinates on which something depends are enumerated,
so 65,536 ranks cost little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from lbpar.layout.exchange import Volume
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Dim, blocks
from lbpar.layout.runs import Many, intersect, length
from lbpar.layout.transition import Move

# Pairs of blocks of one dimension that may be compared; beyond, blocks are sampled.
PAIRS = 1 << 20
# The same where only the largest exchange is asked for.
SAMPLED_PAIRS = 1 << 13

Coords = Mapping[int, Many]


@dataclass(frozen=True)
class Traffic:
    """Messages and elements per rank: arrays over the coordinates along ``axes`` (axis by axis, first fastest)."""

    grid: Grid
    axes: Axes
    messages: np.ndarray
    elements: np.ndarray

    def of(self, rank: int) -> Volume:
        """What one rank sends."""
        coords = self.grid.coords(rank)
        at = _flat(self.axes, self.grid, {a: np.asarray(coords[a]) for a in self.axes})
        return Volume(int(self.messages[at]), int(self.elements[at]))

    @property
    def busiest(self) -> Volume:
        """What the rank that sends most sends."""
        at = int(np.lexsort((self.messages, self.elements))[-1])
        return Volume(int(self.messages[at]), int(self.elements[at]))

    @property
    def total(self) -> Volume:
        """What all ranks send together."""
        copies = self.grid.size // self.messages.size
        return Volume(int(self.messages.sum()) * copies, int(self.elements.sum()) * copies)


@lru_cache(maxsize=1 << 15)
def traffic(move: Move) -> Traffic:
    """What each rank sends in a move, equal to `lbpar.layout.exchange.volume`."""
    grid = move.src.grid
    p = grid.ways(move.axes)
    if move.kind == "slice" or p == 1:
        zero = np.zeros(1, np.int64)
        return Traffic(grid, (), zero, zero)
    if move.kind in ("allreduce", "allgather"):
        return _whole_blocks(move, p)
    moved = set(move.axes)
    dst_axes = set(move.dst.shard_axes)
    copies = grid.ways(tuple(moved - dst_axes))
    sums, counts, selves = [], [], []
    for s, d in zip(move.src.cuts, move.dst.cuts, strict=True):
        total, count = _sent(s, d, move.axes, grid)
        sums.append(total)
        counts.append(count)
        selves.append(_kept(s, d, grid))
    axes = tuple(sorted({a for t in (*sums, *counts, *selves) for a in t.axes}))
    where = _enumerate(axes, grid)
    mine = _product(selves, where, grid)
    elements = copies * _product(sums, where, grid) - mine
    messages = copies * _product(counts, where, grid) - (mine > 0)
    return Traffic(grid, axes, messages, elements)


def _whole_blocks(move: Move, p: int) -> Traffic:
    grid = move.src.grid
    sizes = [_lengths(d, grid) for d in move.src.cuts]
    axes = {a for t in sizes for a in t.axes}
    if move.kind == "allgather":
        where = _enumerate(tuple(sorted(axes)), grid)
        own = _product(sizes, where, grid)
        return Traffic(grid, tuple(sorted(axes)), np.where(own > 0, p - 1, 0), own * (p - 1))
    n = _product(sizes, _enumerate(tuple(sorted(axes)), grid), grid)
    if (n % p).any():  # who holds the larger pieces depends on the place in the group
        axes |= set(move.axes)
    where = _enumerate(tuple(sorted(axes)), grid)
    n = _product(sizes, where, grid)
    piece = n // p
    if set(move.axes) <= axes:
        piece = piece + (_flat(tuple(sorted(move.axes)), grid, where) < n % p)
    there = _product([_lengths(move.src.cuts[-1], grid)], where, grid)
    return Traffic(grid, tuple(sorted(axes)), 2 * (p - 1) * there, (n - piece) + (p - 1) * piece)


@dataclass(frozen=True)
class _Table:
    """Values over the coordinates along some axes (none: one number)."""

    axes: Axes
    values: np.ndarray


def _table(axes: Axes, values: np.ndarray) -> _Table:
    values = np.atleast_1d(values)
    if (values == values[0]).all():
        return _Table((), values[:1])
    return _Table(axes, values)


def _enumerate(axes: Axes, grid: Grid) -> dict[int, np.ndarray]:
    """Coordinates of all combinations along ``axes``, first axis fastest."""
    out, step = {}, 1
    n = grid.ways(axes)
    for a in axes:
        out[a] = (np.arange(n) // step) % grid.sizes[a]
        step *= grid.sizes[a]
    return out


def _flat(axes: Axes, grid: Grid, coords: Coords) -> np.ndarray:
    index: np.ndarray = np.zeros((), np.int64)
    step = 1
    for a in axes:
        index = index + coords[a] * step
        step *= grid.sizes[a]
    return index


def _product(tables: list[_Table], where: Coords, grid: Grid) -> np.ndarray:
    n = next(iter(where.values())).size if where else 1
    out = np.ones(n, np.int64)
    for t in tables:
        out = out * t.values[_flat(t.axes, grid, where)] if t.axes else out * t.values[0]
    return out


@lru_cache(maxsize=1 << 14)
def _lengths(dim: Dim, grid: Grid) -> _Table:
    if len(dim.factors) == 1:
        lo, hi = blocks(dim, grid)
        return _table(dim.all_axes[::-1], hi - lo)
    axes = tuple(sorted(dim.all_axes))
    return _table(axes, np.array([length(dim.runs(grid, c)) for c in _places(_enumerate(axes, grid), grid)]))


def _bounds(dim: Dim, grid: Grid, coords: Coords) -> tuple[np.ndarray, np.ndarray]:
    """First and last+1 index held at some coordinates."""
    lo, hi = blocks(dim, grid)
    at = _flat(dim.all_axes[::-1], grid, coords)
    return lo[at], hi[at]


def longest(dim: Dim, grid: Grid) -> int:
    """Most indices of a dimension that any rank holds."""
    if dim.at is not None:
        return dim.extent
    if dim.window is None and len(dim.factors) == 1:
        return -(-dim.extent // grid.ways(dim.all_axes))
    return int(_lengths(dim, grid).values.max())


def even_exchange(x: Axes, y: Axes, axes: Axes, grid: Grid) -> tuple[int, int, bool] | None:
    """Of two plain cuts into even blocks: into how many parts what a member wants of a block falls; members that get any; whether a
    block leaves.

    A place in a cut is a digit of the index. Where both cut, one reader per digit wants what is held; beyond, all values of a digit are
    held, for as many readers as it has. None where the digits differ in size.
    """
    held, wanted = ([(a, i, p) for a in cut for i, p in enumerate(_primes(grid.sizes[a]))] for cut in (x, y))
    places = list(zip(held, wanted, strict=False))
    if any(a[2] != b[2] for a, b in places):
        return None
    more = wanted[len(held) :]
    share, readers = (prod(p for a, _, p in more if (a in axes) == moved) for moved in (False, True))
    return share, readers, any(b[0] in axes for a, b in places if a != b)


@lru_cache(maxsize=1 << 10)
def _primes(size: int) -> tuple[int, ...]:
    return Grid.of(size).sizes


class _Pairs(NamedTuple):
    """Of some ranks which block of one cut each holds and which of another it wants, numbered as in `blocks`; and the blocks that members
    of its group want: rows of ``theirs``, the row of each rank being ``row``, and ``first`` a rank for each row."""

    held: np.ndarray
    wanted: np.ndarray
    theirs: np.ndarray
    row: np.ndarray
    first: np.ndarray


@lru_cache(maxsize=1 << 7)
def _pairs(x: Axes, y: Axes, moved: Axes, grid: Grid) -> _Pairs:
    """What ranks hold by a cut along ``x`` and want by one along ``y``, in groups over ``moved``: all, or so many that at most
    `SAMPLED_PAIRS` of them and members are compared."""
    x, y, ways, rank = x[::-1], y[::-1], grid.ways(moved), np.arange(grid.size)
    if grid.size * ways > SAMPLED_PAIRS:
        rank = np.unique(np.linspace(0, grid.size - 1, max(16, SAMPLED_PAIRS // ways)).astype(int))
    here = {a: rank // grid.strides[a] % grid.sizes[a] for a in grid.axes}
    # What members want depends on a rank only by what it holds and by where it stays.
    alike = _flat(tuple(a for a in grid.axes if a in x or a not in moved), grid, here)
    _, first, row = np.unique(np.broadcast_to(alike, rank.shape), return_index=True, return_inverse=True)
    stay = {a: 0 if a in moved else c[first] for a, c in here.items()}
    go = dict.fromkeys(y, 0) | _enumerate(tuple(a for a in y if a in moved), grid)
    theirs = np.asarray(_flat(y, grid, stay))[..., None] + _flat(y, grid, go)
    held, wanted = (np.broadcast_to(_flat(z, grid, here), rank.shape) for z in (x, y))
    return _Pairs(held, wanted, np.atleast_2d(theirs), row, first)


@lru_cache(maxsize=1 << 16)
def largest_exchange(s: Dim, d: Dim, axes: Axes, grid: Grid) -> tuple[int, int, int]:
    """Of one dimension, at the coordinates where most leaves: indices sent to members of a group (kept ones included), members that
    get any, indices kept."""
    if len(s.factors) > 1 or len(d.factors) > 1:
        (sent, readers), kept = _sent(s, d, axes, grid), _kept(s, d, grid)
        where = _enumerate(tuple(sorted({*sent.axes, *readers.axes, *kept.axes})), grid)
        total, count, own = (_product([t], where, grid) for t in (sent, readers, kept))
    else:
        x, y = s.all_axes, d.all_axes
        p = _pairs(x, y, tuple(a for a in axes if a in y), grid)
        (lo, hi), (first, last) = blocks(s, grid), blocks(d, grid)
        lo, hi = lo[p.held], hi[p.held]
        theirs = p.theirs[
            :, (last > first)[p.theirs].any(0)
        ]  # many more processes than indices leave most of them nothing
        both = np.minimum(hi[p.first, None], last[theirs]) - np.maximum(lo[p.first, None], first[theirs])
        total, count = np.maximum(both, 0).sum(-1)[p.row], (both > 0).sum(-1)[p.row]
        own = np.maximum(np.minimum(hi, last[p.wanted]) - np.maximum(lo, first[p.wanted]), 0)
    total, count, own = np.broadcast_arrays(total, count, own)
    at = np.lexsort((count, total, total - own))[-1]
    return int(total[at]), int(count[at]), int(own[at])


def _places(coords: Coords, grid: Grid) -> list[tuple[int, ...]]:
    n = next(iter(coords.values())).size if coords else 1
    return [tuple(int(coords[a][i]) if a in coords else 0 for a in grid.axes) for i in range(n)]


@lru_cache(maxsize=1 << 14)
def _kept(s: Dim, d: Dim, grid: Grid) -> _Table:
    """Indices that a rank holds and keeps."""
    axes = tuple(sorted({*s.all_axes, *d.all_axes}))
    coords = _enumerate(axes, grid)
    if len(s.factors) == len(d.factors) == 1:
        (a, b), (c, e) = _bounds(s, grid, coords), _bounds(d, grid, coords)
        both = np.maximum(0, np.minimum(b, e) - np.maximum(a, c))
        return _table(axes, np.broadcast_to(both, (grid.ways(axes),)))
    return _table(axes, np.array([length(intersect(s.runs(grid, c), d.runs(grid, c))) for c in _places(coords, grid)]))


@lru_cache(maxsize=1 << 14)
def _sent(s: Dim, d: Dim, axes: Axes, grid: Grid) -> tuple[_Table, _Table]:
    """Sum over the members' blocks of what a rank holds of each, and how many of them it holds any of."""
    moved = tuple(a for a in sorted(d.all_axes) if a in axes)
    fixed = tuple(sorted({*s.all_axes, *(a for a in d.all_axes if a not in axes)}))
    mine, theirs = _enumerate(fixed, grid), _enumerate(moved, grid)
    if len(s.factors) == len(d.factors) == 1:
        n, m = grid.ways(fixed), grid.ways(moved)
        rows = np.arange(n) if n * m <= PAIRS else np.unique(np.linspace(0, n - 1, max(64, PAIRS // m)).astype(int))
        lo, hi = (np.broadcast_to(x, n)[rows] for x in _bounds(s, grid, mine))
        # Of many more processes than indices most hold nothing, and most want nothing.
        some = hi > lo
        here = {a: v[rows[some], None] for a, v in mine.items()}
        first, last = _bounds(d, grid, here | {a: v[None, :] for a, v in theirs.items()})
        first, last = (np.atleast_2d(x) for x in (first, last))
        wanted = (last > first).any(0)
        first, last = first[:, wanted], last[:, wanted]
        both = np.maximum(0, np.minimum(hi[some, None], last) - np.maximum(lo[some, None], first))
        total, count = np.zeros((2, rows.size), np.int64)
        total[some], count[some] = both.sum(1), (both > 0).sum(1)
        fill = np.searchsorted(rows, np.arange(n), side="right") - 1
        return _table(fixed, total[fill]), _table(fixed, count[fill])
    place, other_place = _places(mine, grid), _places(theirs, grid)
    totals, counts = [], []
    for r in place:
        held = s.runs(grid, r)
        sizes = [
            length(
                intersect(
                    held, d.runs(grid, tuple(o if i in moved else x for i, (x, o) in enumerate(zip(r, q, strict=True))))
                )
            )
            for q in other_place
        ]
        totals.append(sum(sizes))
        counts.append(sum(v > 0 for v in sizes))
    return _table(fixed, np.array(totals)), _table(fixed, np.array(counts))
