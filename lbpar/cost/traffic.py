"""Messages and elements that every rank sends in a move, for any number of ranks at once.

`lbpar.layout.exchange.volume` walks the members of one rank's group. Here the same numbers come from products over
dimensions: a box is a product of index sets, so the elements that a rank sends to all members are the product over
dimensions of the sums over the members' blocks of that dimension. Only coordinates on which something depends are enumerated,
so 65,536 ranks cost little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
SAMPLED_PAIRS = 1 << 12
# Pairs that are compared at once: their arrays stay in a cache.
AT_ONCE = 1 << 16

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


class _Roles(NamedTuple):
    """Of axes along which a dimension is cut before or after an exchange, the sizes of those over which members of a group want different
    blocks: ``both`` cut before, too, ``theirs`` do not; ``mine`` are all others. ``before``, ``after``: of every axis, in this order, how
    many blocks further the next coordinate is."""

    both: tuple[int, ...]
    mine: tuple[int, ...]
    theirs: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]


@lru_cache(maxsize=1 << 14)
def _roles(x: Axes, y: Axes, moved: Axes, grid: Grid) -> _Roles:
    both, theirs = ([a for a in y if a in moved and (a in x) == cut] for cut in (True, False))
    mine = [a for a in dict.fromkeys((*x, *y)) if a not in both and a not in theirs]
    kinds = [sorted(kind, key=lambda a: grid.sizes[a]) for kind in (both, mine, theirs)]
    sizes = [tuple(grid.sizes[a] for a in kind) for kind in kinds]
    steps = [{a: grid.ways(cut[i + 1 :]) for i, a in enumerate(cut)} for cut in (x, y)]
    before, after = (tuple(step.get(a, 0) for kind in kinds for a in kind) for step in steps)
    return _Roles(sizes[0], sizes[1], sizes[2], before, after)


def largest_exchange(s: Dim, d: Dim, axes: Axes, grid: Grid) -> tuple[int, int, int]:
    """Of one dimension, at the coordinates where most leaves: indices sent to members of a group (kept ones included), members that
    get any, indices kept."""
    return largest_exchanges([(s, d, axes, grid)])[0]


def largest_exchanges(asked: Sequence[tuple[Dim, Dim, Axes, Grid]]) -> list[tuple[int, int, int]]:
    """`largest_exchange` of many, those at once whose axes have equal roles and sizes."""
    out: dict[int, tuple[int, int, int]] = {}
    alike: dict[tuple[tuple[int, ...], ...], list[tuple[int, _Roles]]] = {}
    for i, (s, d, axes, grid) in enumerate(asked):
        if len(s.factors) > 1 or len(d.factors) > 1:
            out[i] = _counted(s, d, axes, grid)
        else:
            roles = _roles(s.all_axes, d.all_axes, axes, grid)
            alike.setdefault(roles[:3], []).append((i, roles))
    for (both, mine, theirs), which in alike.items():
        rows, members = prod((*both, *mine)), prod((*both, *theirs))
        if rows * members > SAMPLED_PAIRS:
            rows = min(rows, max(16, SAMPLED_PAIRS // members))
        many = max(1, AT_ONCE // (rows * members))
        for part in (which[i : i + many] for i in range(0, len(which), many)):
            found = _largest(rows, [asked[i] for i, _ in part], [r for _, r in part])
            out.update(zip((i for i, _ in part), map(tuple, found.tolist()), strict=True))
    return [out[i] for i in range(len(asked))]


def _largest(rows: int, asked: Sequence[tuple[Dim, Dim, Axes, Grid]], roles: Sequence[_Roles]) -> np.ndarray:
    """`largest_exchange` of exchanges whose axes have equal roles and sizes, at so many coordinates."""
    both, mine, theirs, *_ = roles[0]
    n, m = len(both), len(both) + len(mine)
    here = np.unique(np.linspace(0, prod((*both, *mine)) - 1, rows).astype(int))
    src, dst = np.array([r[3:] for r in roles], np.int64).swapaxes(0, 1)
    cuts = [[blocks(dims[end], dims[3]) for dims in asked] for end in (0, 1)]
    start = [np.cumsum([0, *(len(b[0]) for b in c)])[:-1, None] for c in cuts]
    (lo, hi), (first, last) = ([np.concatenate(x) for x in zip(*c, strict=True)] for c in cuts)

    def shared(held: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        return np.maximum(np.minimum(hi[held], last[wanted]) - np.maximum(lo[held], first[wanted]), 0)

    coords = _digits((*both, *mine), here)
    held = src[:, :m] @ coords + start[0]
    stay = dst[:, n:m] @ coords[n:] + start[1]
    indices = max(d.factors[0] for _, d, *_ in asked)
    if prod((*both, *theirs)) > indices:  # most members want nothing: look at the others
        some = [np.flatnonzero(end > begin) for begin, end in cuts[1]]
        empty = [(end - begin).argmin() for begin, end in cuts[1]]
        most = max(map(len, some))
        wanted = np.array([np.pad(w, (0, most - w.size), constant_values=e) for w, e in zip(some, empty, strict=True)])
        sent = shared(held[..., None], (wanted + start[1])[:, None])
        for digit, step, size in zip(coords[n:], dst.T[n:m, :, None, None], mine, strict=True):
            sent *= (step == 0) | (wanted[:, None] // np.maximum(step, 1) % size == digit[:, None])
    else:
        members = dst[:, [*range(n), *range(m, dst.shape[1])]] @ _digits(
            (*both, *theirs), np.arange(prod((*both, *theirs)))
        )
        sent = shared(held[..., None], stay[..., None] + members[:, None])
    # Nobody keeps anything of more blocks than there are indices: the last of them are empty.
    alone = np.arange(prod(theirs))[-indices - 1 :]
    own = stay + dst[:, :n] @ coords[:n]
    kept = shared(held[..., None], own[..., None] + (dst[:, m:] @ _digits(theirs, alone))[:, None]).min(-1)
    total, readers = sent.sum(-1), (sent > 0).sum(-1)
    score = ((total - kept) * (total.max() + 1) + total) * (readers.max() + 1) + readers
    at = score.argmax(1)[:, None]
    return np.concatenate([np.take_along_axis(x, at, 1) for x in (total, readers, kept)], 1)


def _digits(sizes: tuple[int, ...], numbers: np.ndarray) -> np.ndarray:
    """A row for each digit of some numbers, the first counting ones."""
    out = np.empty((len(sizes), numbers.size), np.int64)
    for row, size in zip(out, sizes, strict=True):
        numbers, row[:] = np.divmod(numbers, size)
    return out


def _counted(s: Dim, d: Dim, axes: Axes, grid: Grid) -> tuple[int, int, int]:
    (sent, readers), kept = _sent(s, d, axes, grid), _kept(s, d, grid)
    where = _enumerate(tuple(sorted({*sent.axes, *readers.axes, *kept.axes})), grid)
    total, count, own = np.broadcast_arrays(*(_product([t], where, grid) for t in (sent, readers, kept)))
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
