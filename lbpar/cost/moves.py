"""Seconds of moves between layouts, for one pair or for arrays of them: the one place where communication is priced.

Seconds are those of the largest blocks, dimension by dimension. It does not matter which axes cut a dimension, only how its cuts before and
after share them: dimensions that are alike in this have one number (their *case*), and what they send is counted once for every extent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from math import prod
from operator import or_
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from lbpar.cost.machine import Machine, Term
from lbpar.cost.traffic import even_exchange, largest_exchange, longest, traffic
from lbpar.layout.cuts import Ints, Many, Numbering, bits, by_value, cuts_of
from lbpar.layout.exchange import Volume
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Dim
from lbpar.layout.transition import Move, MoveKind, Stage, stages

Floats = NDArray[np.float64]
#: Processes up to which bytes and messages are counted rank by rank.
COUNTED = 4096
KINDS: tuple[MoveKind, ...] = get_args(MoveKind)
#: Cuts of a tensor, at most: samples, three of space, channels, and where it is.
MOST_DIMS = 6
#: Axes, and the dimension itself where ghosts, several loops or one part that has all make it more than a plain cut.
Cut = tuple[tuple[Axes, ...], Dim | None]


def grown(rows: NDArray[Any], size: int) -> NDArray[Any]:
    """An array with room for so many rows, the new ones zero."""
    if size <= len(rows):
        return rows
    more = np.zeros((2 * size, *rows.shape[1:]), rows.dtype)
    more[: len(rows)] = rows
    return more


class Made:
    """Values of numbered things (so many for each), made when they are first asked for."""

    def __init__(self, make: Callable[[Ints], Many], width: int) -> None:
        self._make, self._values, self._known = make, [np.zeros(0)] * width, np.zeros(0, bool)

    def of(self, numbers: Ints, row: int = 0) -> NDArray[Any]:
        """One value of each of some things."""
        return self.made(numbers)[row][numbers]

    def made(self, numbers: Ints) -> list[NDArray[Any]]:
        """Every value of all things, by number; at least those of ``numbers`` are made."""
        size = int(numbers.max(initial=-1)) + 1
        if size > self._known.size:
            self._values, self._known = [grown(v, size) for v in self._values], grown(self._known, size)
        new = ~self._known[numbers]
        if new.any():
            missing = np.zeros(size, bool)
            missing[numbers[new]] = True
            at = np.flatnonzero(missing)
            for values, made in zip(self._values, np.reshape(self._make(at), (-1, at.size)), strict=True):
                values[at] = made
            self._known[at] = True
        return self._values


def block_size(extent: int, parts: Many) -> Many:
    """Most indices of a dimension that a rank holds; a negative number of parts gives it, whatever the extent."""
    return np.where(parts > 0, -(-extent // np.maximum(parts, 1)), -parts)


class MoveVolumes:
    """What moves on one grid send, dimension by dimension.

    How a dimension moves is a *case*: its cuts before and after, and along which axes it goes, whichever these are.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid, self.cuts = grid, cuts_of(grid)
        self.ways = np.ones(self.cuts.everything + 1, np.int64)
        for a in grid.axes:
            self.ways[np.arange(self.ways.size) >> a & 1 == 1] *= grid.sizes[a]
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._keys = Numbering()  # of cases: cuts before and after, axes, grid of these
        self._parts = Made(self._cut_parts, 1)
        self._described = Made(self._describe, 6)
        self._by_extent: dict[Any, Made] = {}
        self._case(0, 0, 0)  # number 0: not cut, nothing moves

    def size(self, shape: tuple[int, ...], cuts: Sequence[Ints]) -> Many:
        """Elements of the largest block."""
        return prod((block_size(e, self._parts.of(c)) for e, c in zip(shape, cuts, strict=True)), start=1)

    def _cut_parts(self, cuts: Ints) -> Ints:
        return np.array([_parts(self.cuts.dim(c, 0), self.grid) for c in cuts.tolist()])

    def cases(self, s: Stage) -> list[Many]:
        """The case of every dimension."""
        return [by_value(self._case, c, d, s.axes & self.cuts.mask(d)) for c, d in zip(s.src, s.dst, strict=True)]

    def _case(self, c: int, d: int, moved: int) -> int:
        known = self._numbers.get((c, d, moved))
        if known is None:
            s, t = self.cuts.dim(c, 0), self.cuts.dim(d, 0)
            number = {a: i for i, a in enumerate(dict.fromkeys((*s.all_axes, *t.all_axes)))}
            key = (
                _renumbered(s, number),
                _renumbered(t, number),
                tuple(sorted(number[a] for a in self.cuts.axes(moved) if a in number)),
                Grid(tuple(self.grid.sizes[a] for a in number)),
            )
            known = self._numbers[c, d, moved] = self._keys(key)
        return known

    def _describe(self, cases: Ints) -> Ints:
        """Parts before and after, what `even_exchange` says of even blocks (no readers: nothing), and whether one part has all."""
        out = []
        for s, t, axes, grid in self._keys.of(cases):
            even = even_exchange(s[0][0], t[0][0], axes, grid) if s[1] is t[1] is None else None
            lone = any(x[1] is not None and x[1].at is not None for x in (s, t))
            out.append((*(_parts(_dim(x, 0), grid) for x in (s, t)), *(even or (1, 0, 0)), lone))
        return np.array(out).T

    def _table(self, make: Callable[[int, Ints], Many], extent: int, width: int) -> Made:
        """What is made of every case of a dimension of some extent."""
        if (make, extent) not in self._by_extent:
            self._by_extent[make, extent] = Made(lambda cases: make(extent, cases), width)
        return self._by_extent[make, extent]

    def _sizes(self, extent: int, cases: Ints) -> Many:
        """The largest block before and after."""
        return [block_size(extent, self._described.of(cases, end)) for end in (0, 1)]

    def _exchanges(self, extent: int, cases: Ints) -> Many:
        """`largest_exchange`."""
        before, after, share, readers, leaves, _ = (v[cases] for v in self._described.made(cases))
        held, wanted = block_size(extent, before), block_size(extent, after)
        whole = (before == 1) & (share == 1)  # most leaves where the block that is kept is small
        kept = np.where(whole, extent // np.maximum(after, 1), np.minimum(held, wanted))
        out = np.array(
            [held // share, np.where(whole, np.minimum(readers, extent), readers), np.where(leaves, 0, kept)]
        )
        even = (held * before == extent) & (wanted * after == extent)
        same = (before == after) & (share == 1) & (readers == 1) & (leaves == 0)
        uneven = (readers == 0) | ~(even | whole | same | (after == 1))
        for i in np.flatnonzero(uneven).tolist():
            out[:, i] = _exchange(extent, *self._keys.things[cases[i]])
        return out

    def volume(
        self, kind: MoveKind, ways: Ints, copies: Ints, cases: Sequence[Ints], shape: tuple[int, ...]
    ) -> tuple[Many, Many, Many]:
        """Elements and messages that the busiest rank sends (but for slices), and elements of the block that it then holds; the largest blocks are taken
        in every dimension.

        Parameters
        ----------
        ways, copies : int arrays
            Processes of the groups; those of them along axes that do not cut what arrives.
        """

        def product(make: Callable[[int, Ints], Many], width: int, rows: Sequence[int], start: Many = 1) -> list[Many]:
            tables = [self._table(make, e, width).made(c) for e, c in zip(shape, cases, strict=True)]
            return [prod((t[row][c] for t, c in zip(tables, cases, strict=True)), start=start) for row in rows]

        (after,) = product(self._sizes, 2, (1,), np.ones(ways.size))
        if kind == "slice":
            return after, after, after
        if kind == "allreduce":
            return 2 * after * (ways - 1) / ways, 2 * (ways - 1), after
        if kind == "allgather":
            (block,) = product(self._sizes, 2, (0,))
            return block * (ways - 1), ways - 1, after
        lone = sum(self._described.of(c, 5) for c in cases) > 0 if self.cuts.has_at else False
        if kind == "reduce_scatter" and not np.any(lone):
            return after * (ways - 1), ways - 1, after
        sent, readers, kept = product(self._exchanges, 3, (0, 1, 2))
        sent, readers = sent * copies - kept, readers * copies - (kept > 0)
        if kind == "reduce_scatter":  # to one part all others send all that they have
            return np.where(lone, sent, after * (ways - 1)), np.where(lone, readers, ways - 1), after
        return sent, readers, after


class MovePrices:
    """Prices moves on one grid of one machine."""

    def __init__(self, machine: Machine, grid: Grid) -> None:
        self.machine, self.grid, self.volumes = machine, grid, move_volumes(grid)
        self.cuts, self.ways = self.volumes.cuts, self.volumes.ways
        self._groups = Numbering()  # the levels that they span
        self._terms: dict[MoveKind, Made] = {}
        self._between = np.full((1, 1), -1, np.int32)  # numbers of transitions
        self._spans = np.zeros(
            (1, 2), np.int32
        )  # of every transition: its first stage, the end of its stages; 0 has none
        self._stages = np.zeros((0, 4 + MOST_DIMS), np.int64)
        self._counts = [1, 0]  # transitions and stages so far
        self._prices: dict[tuple[tuple[int, ...], int], Made] = {}
        self._moves: dict[tuple[Move, int], float] = {}

    def _group(self, axes: int) -> int:
        """The number of groups over links like those of these axes."""
        return self._groups(self.machine.parts(self.grid, self.cuts.axes(axes)))

    def terms(self, kind: MoveKind, groups: Ints) -> tuple[Term, Term]:
        """`Machine.terms` of groups by number."""
        if kind not in self._terms:

            def make(new: Ints) -> Floats:
                return np.array([self.machine.terms(kind, parts) for parts in self._groups.of(new)]).reshape(-1, 10).T

            self._terms[kind] = Made(make, 10)
        values = [v[groups] for v in self._terms[kind].made(groups)]
        return Term(*values[:5]), Term(*values[5:])

    def allreduce(self, axes: Ints) -> Term:
        """What allreduces over sets of axes cost."""
        return self.terms("allreduce", by_value(self._group, axes))[0]

    def _columns(self, s: Stage) -> list[Many]:
        """What stages are priced by: kind, group, processes, those of them that get copies, case of every dimension."""
        goal = reduce(or_, (self.cuts.mask(d) for d in s.dst), 0)
        group, ways, copies = by_value(self._group, s.axes), self.ways[s.axes], self.ways[s.axes & ~goal]
        return [KINDS.index(s.kind), group, ways, copies, *self.volumes.cases(s)]

    def of_moves(self, asked: Collection[tuple[Move, int]]) -> list[float]:
        """Seconds of moves with so many bytes per element; those of one shape are priced at once."""
        new: dict[tuple[tuple[int, ...], int], list[Move]] = {}
        for move, item in dict.fromkeys(asked):
            if (move, item) not in self._moves:
                new.setdefault((_extents(move), item), []).append(move)
        for (shape, item), moves in new.items():
            columns = np.array([self._columns(_stage(m)) for m in moves]).T
            for m, seconds in zip(moves, self.stage_seconds(shape, item, columns), strict=True):
                self._moves[m, item] = float(seconds)
        return [self._moves[m] for m in asked]

    def between(self, src: Ints, dst: Ints) -> Ints:
        """Numbers of the transitions from some layouts to others, by the numbers of these; 0 where nothing moves."""
        n, known = len(self.cuts.places.things), len(self._between)
        if n > known:
            more = np.full((2 * n, 2 * n), -1, np.int32)
            more[:known, :known] = self._between
            self._between = more
        found = self._between[src, dst]
        new = found < 0
        if not new.any():
            return found
        a, b = (x[new] for x in np.broadcast_arrays(src, dst))
        a, b = np.divmod(np.unique(a.astype(np.int64) * n + b), n)
        here, there = (np.array(self.cuts.places.of(x)).T for x in (a, b))
        made = stages(self.cuts, list(here[:-1]), list(there[:-1]), here[-1], there[-1], shape=a.shape)
        self._between[a, b] = self.transitions(made, a.size)
        return self._between[src, dst]

    def transitions(self, made: Sequence[Stage], count: int) -> Ints:
        """Numbers of so many transitions that are made of these stages; 0 where nothing moves."""
        places: list[Many] = [s.at for s in made]
        at = np.concatenate(places) if made else np.zeros(0, int)
        rows = [np.stack(np.broadcast_arrays(*self._columns(s), x)[:-1], 1) for s, x in zip(made, places, strict=True)]
        moves, of = np.unique(at, return_inverse=True)
        (known, first), new = self._counts, np.bincount(of, minlength=moves.size)
        end = first + np.cumsum(new)
        self._counts = [known + moves.size, first + at.size]
        self._spans, self._stages = grown(self._spans, self._counts[0]), grown(self._stages, self._counts[1])
        self._spans[known : self._counts[0]] = np.stack([end - new, end], 1)
        if rows:
            ordered = np.concatenate(rows)[np.argsort(at, kind="stable")]
            self._stages[first : self._counts[1], : ordered.shape[1]] = ordered
        out = np.zeros(count, int)
        out[moves] = known + np.arange(moves.size)
        return out

    def communicates(self, transition: int) -> bool:
        """Whether a numbered transition is more than slices."""
        first, end = self._spans[transition]
        return bool((self._stages[first:end, 0] != KINDS.index("slice")).any())

    def seconds(self, shape: tuple[int, ...], item: int, transitions: Ints) -> Floats:
        """Seconds of numbered transitions of a tensor; ``item`` is bytes per element."""
        if (shape, item) not in self._prices:
            one = (1,)  # stages may have a case for where the tensor is, too
            self._prices[shape, item] = Made(
                lambda new: self._transition_seconds((*shape, *(one * self.cuts.has_at)), item, new), 1
            )
        return self._prices[shape, item].of(transitions)

    def _transition_seconds(self, shape: tuple[int, ...], item: int, transitions: Ints) -> Many:
        first, end = self._spans[transitions].T
        count = end - first
        rows = np.repeat(end - np.cumsum(count), count) + np.arange(count.sum())
        seconds = self.stage_seconds(shape, item, self._stages[rows].T)
        return np.bincount(np.repeat(np.arange(count.size), count), seconds, count.size)

    def stage_seconds(self, shape: tuple[int, ...], item: int, columns: Ints) -> Floats:
        """Seconds of stages, packing and unpacking included; ``shape`` has an extent for every case."""
        out = np.zeros(columns.shape[1])
        for code, kind in enumerate(KINDS):
            at = np.flatnonzero(columns[0] == code)
            if at.size:
                group, ways, copies, *cases = columns[1:, at][: 3 + len(shape)]
                sent, messages, after = self.volumes.volume(kind, ways, copies, cases, shape)
                out[at] = self.machine.copy_seconds(after * item) if kind != "allreduce" else 0.0
                if kind != "slice":
                    out[at] += np.minimum(*(t.seconds(sent * item, messages) for t in self.terms(kind, group)))
        return out


def _renumbered(d: Dim, number: Mapping[int, int]) -> Cut:
    axes = tuple(tuple(number[a] for a in each) for each in d.axes)
    return axes, None if _plain(d) else d


def _dim(cut: Cut, extent: int) -> Dim:
    return Dim(extent, (extent,), cut[0]) if cut[1] is None else replace(cut[1], axes=cut[0])


def _parts(d: Dim, grid: Grid) -> int:
    """Of a plain cut its number of parts, of another one the size of its largest block, negative (see `block_size`)."""
    return grid.ways(d.all_axes) if _plain(d) else -longest(d, grid)


def _plain(d: Dim) -> bool:
    return d.window is None and len(d.factors) == 1 and d.at is None


def _exchange(extent: int, s: Cut, t: Cut, axes: Axes, grid: Grid) -> tuple[int, int, int]:
    # Blocks of an extent that all axes divide are multiples of those of the smallest such extent.
    scale = extent // grid.size if s[1] is t[1] is None and extent % grid.size == 0 else 1
    sent, readers, kept = largest_exchange(_dim(s, extent // scale), _dim(t, extent // scale), axes, grid)
    return sent * scale, readers, kept * scale


@lru_cache(maxsize=8)
def move_prices(machine: Machine, grid: Grid) -> MovePrices:
    """The prices of moves on a grid of a machine."""
    return MovePrices(machine, grid)


@lru_cache(maxsize=8)
def move_volumes(grid: Grid) -> MoveVolumes:
    """The volumes of moves on a grid."""
    return MoveVolumes(grid)


def _extents(move: Move) -> tuple[int, ...]:
    """Of what moves: the shape, and 1 for where it is if that is not everywhere."""
    return move.src.shape if move.src.at is move.dst.at is None else (*move.src.shape, 1)


def _stage(move: Move) -> Stage:
    cuts, n = cuts_of(move.src.grid), len(_extents(move))
    src, dst = (tuple(cuts.number(d) for d in x.cuts[:n]) for x in (move.src, move.dst))
    return Stage(move.kind, bits(move.axes), src, dst)


@lru_cache(maxsize=1 << 15)
def busiest(move: Move) -> Volume:
    """What the rank that sends most in a move sends: exact up to `COUNTED` processes, that of the largest blocks beyond."""
    if move.src.grid.size <= COUNTED:
        return traffic(move).busiest
    if move.kind == "slice":
        return Volume()
    s, volumes = _stage(move), move_volumes(move.src.grid)
    left = s.axes & ~reduce(or_, (volumes.cuts.mask(d) for d in s.dst), 0)
    ways, copies, *cases = (np.array([x]) for x in (volumes.ways[s.axes], volumes.ways[left], *volumes.cases(s)))
    sent, messages, _ = volumes.volume(move.kind, ways, copies, cases, _extents(move))
    return Volume(int(messages[0]), int(sent[0]))


@lru_cache(maxsize=1 << 15)
def move_price(move: Move, item: int, machine: Machine) -> tuple[float, int, int]:
    """Seconds, bytes and messages of a move, the two latter of the busiest rank; ``item`` is bytes per element."""
    (seconds,) = move_prices(machine, move.src.grid).of_moves([(move, item)])
    return seconds, busiest(move).elements * item, busiest(move).messages
