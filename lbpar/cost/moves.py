"""Seconds of moves between layouts, for one pair or for arrays of them: the one place where communication is priced.

Seconds are those of the largest blocks, dimension by dimension. It does not matter which axes cut a dimension, only how its cuts before and
after share them: dimensions that are alike in this have one number (their *case*), and what they send is counted once for every extent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from itertools import takewhile
from math import prod
from operator import or_
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from lbpar.cost.machine import Machine, Term
from lbpar.cost.traffic import even_exchange, largest_exchanges, longest, traffic
from lbpar.layout.cuts import Ints, Many, Numbering, bits, by_value, cuts_of, distinct, once
from lbpar.layout.exchange import Volume
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Dim
from lbpar.layout.transition import Move, MoveKind, Stage, stages

Floats = NDArray[np.float64]
#: Processes up to which bytes and messages are counted rank by rank.
COUNTED = 4096
#: In place of what is not counted yet, and of what will be.
UNKNOWN, ASKED = -1, -2
KINDS: tuple[MoveKind, ...] = get_args(MoveKind)
#: Those that depend on what every member of a group wants.
EXCHANGED = [KINDS.index(kind) for kind in ("alltoall", "halo", "p2p", "accumulate")]
#: Those in which the rank with the largest block sends most.
WHOLE = [KINDS.index(kind) for kind in ("allreduce", "allgather", "slice")]
#: Cuts of a tensor, at most: samples, three of space, channels, and where it is.
MOST_DIMS = 6
#: Stages of a transition, at most (see `lbpar.layout.transition.stages`).
MOST_STAGES = 6
#: Axes, and the dimension itself where ghosts, several loops or one part that has all make it more than a plain cut.
Cut = tuple[tuple[Axes, ...], Dim | None]


def roomy(table: NDArray[Any], *shape: int, fill: float = 0) -> NDArray[Any]:
    """A table with room for so many entries along its first axes."""
    shape += table.shape[len(shape) :]
    if all(a >= b for a, b in zip(table.shape, shape, strict=True)):
        return table
    sizes = [a if a >= b else b + b // 2 for a, b in zip(table.shape, shape, strict=True)]
    more = (
        np.full(sizes, fill, table.dtype) if fill else np.zeros(sizes, table.dtype)
    )  # which takes memory when it is used
    more[tuple(map(slice, table.shape))] = table
    return more


class Made:
    """Values of numbered things (so many for each), made when they are first asked for."""

    def __init__(self, make: Callable[[Ints], Many], width: int, dtype: type = int) -> None:
        self._make, self._known = make, np.zeros(0, bool)
        self._values: list[NDArray[Any]] = [np.zeros(0, dtype)] * width

    def of(self, numbers: Ints, row: int = 0) -> NDArray[Any]:
        """One value of each of some things."""
        return self.made(numbers)[row][numbers]

    def made(self, numbers: Ints) -> list[NDArray[Any]]:
        """Every value of all things, by number; at least those of ``numbers`` are made."""
        size = int(numbers.max(initial=-1)) + 1
        if size > self._known.size:
            self._values, self._known = [roomy(v, size) for v in self._values], roomy(self._known, size)
        new = ~self._known[numbers]
        if new.any():
            missing = np.zeros(size, bool)
            missing[numbers[new]] = True
            at = np.flatnonzero(missing)
            for values, made in zip(self._values, np.reshape(self._make(at), (-1, at.size)), strict=True):
                values[at] = made
            self._known[at] = True
        return self._values


def block_size(extent: Many, parts: Many) -> Many:
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
        self._keys = Numbering()  # of cases: cuts before and after, axes, sizes of these
        self._parts = Made(self._cut_parts, 1)
        self._described = Made(self._describe, 6)
        self._extents = Numbering()
        self._busiest: dict[Move, Volume] = {}
        self._columns: dict[Move, tuple[Many, ...]] = {}
        #: By extent and case: the largest block before and after, and what `largest_exchange` says; negative where not yet counted.
        self._counted = np.zeros((5, 0, 0))

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
                tuple(self.grid.sizes[a] for a in number),
            )
            known = self._numbers[c, d, moved] = self._keys(key)
        return known

    def _describe(self, cases: Ints) -> Ints:
        """Parts before and after, what `even_exchange` says of even blocks (no readers: nothing), and whether one part has all."""
        out = []
        for s, t, axes, sizes in self._keys.of(cases):
            grid = _grid(sizes)
            even = even_exchange(s[0][0], t[0][0], axes, grid) if s[1] is t[1] is None else None
            lone = any(x[1] is not None and x[1].at is not None for x in (s, t))
            out.append((*(_parts(_dim(x, 0), grid) for x in (s, t)), *(even or (1, 0, 0)), lone))
        return np.array(out).T

    def rows(self, shape: Iterable[Many]) -> list[Many]:
        """Numbers of extents."""
        return [np.array([self._extents(e) for e in np.ravel(x).tolist()]).reshape(np.shape(x)) for x in shape]

    def count(self, asked: Iterable[tuple[Sequence[Many], Ints]]) -> None:
        """Count what tensors need for some stages, all at once: numbers of their extents, and columns as of `MovePrices`."""
        extents, count = len(self._extents.things), len(self._keys.things)
        self._counted = roomy(self._counted, 5, extents, count, fill=UNKNOWN)
        new: tuple[list[Ints], list[Ints]] = ([], [])
        for rows, (kinds, *_, cases) in ((r, (c[0], c[4:])) for r, c in asked):
            sends = np.flatnonzero(np.isin(kinds, self._exchanged()))
            for row, case in zip(rows, cases, strict=False):
                for first, at, found in ((0, slice(None), new[0]), (2, sends, new[1])):
                    e, c = row if row.ndim == 0 else row[at], case[at]
                    missing = self._counted[first, e, c] == UNKNOWN
                    if missing.any():
                        self._counted[first, e, c] = np.where(missing, ASKED, self._counted[first, e, c])
                        found.append(once((e * count + c)[missing]))
        for found, first, end, make in ((new[0], 0, 2, self._sizes), (new[1], 2, 5, self._exchanges)):
            if found:
                e, c = np.divmod(np.concatenate(found), count)
                self._counted[first:end, e, c] = make(np.array(self._extents.things)[e], c)

    def _exchanged(self) -> list[int]:
        """Kinds of stages of which it matters what every member wants: sums only where all go to one part."""
        return EXCHANGED + [KINDS.index("reduce_scatter")] * self.cuts.has_at

    def _sizes(self, extents: Ints, cases: Ints) -> Many:
        """The largest block before and after."""
        return np.array([block_size(extents, self._described.of(cases, end)) for end in (0, 1)])

    def _exchanges(self, extents: Ints, cases: Ints) -> Ints:
        """`largest_exchange`."""
        before, after, share, readers, leaves, _ = (v[cases] for v in self._described.made(cases))
        held, wanted = block_size(extents, before), block_size(extents, after)
        whole = (before == 1) & (share == 1)  # most leaves where the block that is kept is small
        kept = np.where(whole, extents // np.maximum(after, 1), np.minimum(held, wanted))
        out = np.array(
            [held // share, np.where(whole, np.minimum(readers, extents), readers), np.where(leaves, 0, kept)]
        )
        even = (held * before == extents) & (wanted * after == extents)
        same = (before == after) & (share == 1) & (readers == 1) & (leaves == 0)
        uneven = (readers == 0) | ~(even | whole | same | (after == 1))
        keys = zip(extents[uneven].tolist(), self._keys.of(cases[uneven]), strict=True)
        found = largest_exchanges([(_dim(s, e), _dim(t, e), axes, _grid(sizes)) for e, (s, t, axes, sizes) in keys])
        out[:, uneven] = np.reshape(found, (-1, 3)).T
        return out

    def volumes(self, rows: Sequence[Many], columns: Ints) -> tuple[Floats, Floats, Floats]:
        """Elements and messages that the busiest rank sends in some stages, and elements of the block that it then holds; the largest
        blocks are taken in every dimension.

        Parameters
        ----------
        rows : sequence of int or int arrays
            Numbers of extents that were counted: of one tensor, or of one for each stage.
        columns : int array
            Stages: kind, group, processes, those of them that get copies, case of every dimension.
        """
        kinds, _, ways, copies, *cases = columns

        def product(value: int, at: Any = slice(None)) -> Floats:
            counted = self._counted[value]
            parts = (counted[row[at] if row.ndim else row, case[at]] for row, case in zip(rows, cases, strict=False))
            return prod(parts, start=np.ones(kinds[at].size))

        after = product(1)
        sent, messages = np.zeros_like(after), np.zeros_like(after)
        for kind, at in by_kind(kinds):
            p = ways[at]
            if kind == "slice":
                continue
            if kind == "allreduce":
                sent[at], messages[at] = 2 * after[at] * (p - 1) / p, 2 * (p - 1)
            elif kind in ("reduce_scatter", "allgather"):
                block = after[at] if kind == "reduce_scatter" else product(0, at)
                sent[at], messages[at] = block * (p - 1), p - 1
                if kind == "reduce_scatter" and self.cuts.has_at:  # to one part all others send all that they have
                    at = np.arange(kinds.size)[at][sum(self._described.of(c[at], 5) for c in cases) > 0]
            if KINDS.index(kind) in self._exchanged():
                most, readers, kept = (product(value, at) for value in (2, 3, 4))
                sent[at], messages[at] = most * copies[at] - kept, readers * copies[at] - (kept > 0)
        return sent, messages, after

    def cut_rows(self, rows: Sequence[Many], columns: Ints) -> NDArray[np.bool_]:
        """Whether stages move parts of rows: they change how the last dimension is cut, of those that have more than one index."""
        out, seen = np.zeros(columns[0].shape, bool), np.zeros(columns[0].shape, bool)
        for row, case in reversed(list(zip(rows, columns[4:], strict=False))):
            before, after = (self._described.of(case, end) for end in (0, 1))
            long = np.array(self._extents.things)[row] > 1
            out, seen = np.where(long & ~seen, before != after, out), seen | long
        return out

    def columns(self, s: Stage) -> list[Many]:
        """Stages as numbers: kind, axes, processes, those of them that get copies, case of every dimension."""
        goal = reduce(or_, (self.cuts.mask(d) for d in s.dst), 0)
        return [KINDS.index(s.kind), s.axes, self.ways[s.axes], self.ways[s.axes & ~goal], *self.cases(s)]

    def of_moves(self, moves: Sequence[Move]) -> tuple[list[Many], Ints]:
        """Numbers of extents of some moves, counted, and their columns; tensors with fewer dimensions have further ones of extent 1."""
        none = self.cases(Stage("slice", 0, (0,), (0,)))
        rows = self.rows(np.array([(*m.src.shape, *[1] * (MOST_DIMS - len(m.src.dims))) for m in moves]).T)
        for m in moves:
            if m not in self._columns:
                s = _stage(m)
                self._columns[m] = (*self.columns(s), *none * (MOST_DIMS - len(s.src)))
        columns = np.array([self._columns[m] for m in moves]).T
        self.count([(rows, columns)])
        return rows, columns

    def busiest(self, moves: Iterable[Move]) -> dict[Move, Volume]:
        """What the rank that sends most sends in moves, these and those of earlier calls: exact up to `COUNTED` processes, that of the
        largest blocks beyond."""
        new = [m for m in dict.fromkeys(moves) if m not in self._busiest]
        if new:
            rows, columns = self.of_moves(new)
            sent, messages, after = self.volumes(rows, columns)
            kinds, p = columns[0], columns[2]
            if self.grid.size <= COUNTED:
                sent = np.where(kinds == KINDS.index("allreduce"), after + (p - 2) * np.ceil(after / p), sent)
            exact = np.isin(kinds, WHOLE) | (self.grid.size > COUNTED)
            even = np.ones_like(exact)  # where all blocks are equal, all ranks send alike
            for row, cases in zip(rows, columns[4:], strict=True):
                for end in (0, 1):
                    parts = self._described.of(cases, end)
                    even &= (parts > 0) & (np.array(self._extents.things)[row] % np.maximum(parts, 1) == 0)
            largest = zip(new, exact | even, messages.tolist(), sent.tolist(), strict=True)
            self._busiest.update(
                (m, Volume(int(n), int(k)) if known else traffic(m).busiest) for m, known, n, k in largest
            )
        return self._busiest


class MovePrices:
    """Prices moves on one grid of one machine."""

    def __init__(self, machine: Machine, grid: Grid) -> None:
        self.machine, self.grid, self.volumes = machine, grid, move_volumes(grid)
        self.cuts, self.ways = self.volumes.cuts, self.volumes.ways
        self._groups = Numbering()  # the levels that they span
        self._group = Made(lambda axes: np.array([self._levels(a) for a in axes.tolist()]), 1)
        self._terms: dict[MoveKind, Made] = {}
        self._between = np.zeros((1, 1), np.int32)  # numbers of transitions, from 1 on
        self._places = Made(self._placed, 1 + MOST_DIMS)  # partial axes and cuts of layouts
        #: Stages by number; of every transition the numbers of its stages. The first of each is none.
        self._stages, self._steps = np.zeros((4 + MOST_DIMS, 1), np.int32), np.zeros((MOST_STAGES, 1), np.int32)
        self._counts = [1, 1]  # stages and transitions so far
        self._moves: dict[tuple[Move, int], float] = {}

    def _levels(self, axes: int) -> int:
        """The number of groups over links like those of these axes."""
        return self._groups(self.machine.parts(self.grid, self.cuts.axes(axes)))

    def _placed(self, places: Ints) -> Ints:
        """Tensors with fewer dimensions have further ones that nothing cuts."""
        layouts = self.cuts.places.of(places)
        return np.array([(partial, *dims, *[0] * (MOST_DIMS - len(dims))) for *dims, partial in layouts]).T

    def terms(self, kind: MoveKind, groups: Ints) -> tuple[Term, Term]:
        """`Machine.terms` of groups by number."""
        if kind not in self._terms:

            def make(new: Ints) -> Floats:
                return np.array([self.machine.terms(kind, parts) for parts in self._groups.of(new)]).reshape(-1, 10).T

            self._terms[kind] = Made(make, 10, float)
        values = [v[groups] for v in self._terms[kind].made(groups)]
        return Term(*values[:5]), Term(*values[5:])

    def allreduce(self, axes: Ints) -> Term:
        """What allreduces over sets of axes cost."""
        return self.terms("allreduce", self._group.of(axes))[0]

    def of_moves(self, asked: Collection[tuple[Move, int]]) -> list[float]:
        """Seconds of moves with so many bytes per element; new ones are priced at once."""
        new = [m for m in dict.fromkeys(asked) if m not in self._moves]
        if new:
            rows, columns = self.volumes.of_moves([move for move, _ in new])
            columns[1] = self._group.of(columns[1])
            seconds = self.stage_seconds(rows, np.array([item for _, item in new]), columns)
            self._moves.update(zip(new, seconds.tolist(), strict=True))
        return [self._moves[m] for m in asked]

    def between(self, *asked: tuple[Ints, Ints]) -> list[Ints]:
        """Numbers of the transitions from some layouts to others, by the numbers of these; 0 where nothing moves."""
        n = len(self.cuts.places.things)
        self._between = roomy(self._between, n, n)
        new = []
        for pair in asked:
            a, b = (x.reshape(-1) for x in np.broadcast_arrays(*pair))
            at = np.flatnonzero(self._between[a, b] == 0)
            self._between[a[at], b[at]] = -1  # met
            new.append(once(a[at].astype(np.int64) * n + b[at]))
        if any(x.size for x in new):
            a, b = np.divmod(np.concatenate(new), n)
            here, there = ([v[x] for v in self._places.made(x)] for x in (a, b))
            made = stages(self.cuts, here[1:], there[1:], here[0], there[0], shape=a.shape)
            self._between[a, b] = self.transitions(made, a.size) + 1
        return [self._between[pair] - 1 for pair in asked]

    def transitions(self, made: Sequence[Stage], count: int) -> Ints:
        """Numbers of so many transitions that are made of these stages; 0 where nothing moves."""
        out, step = np.zeros(count, int), np.zeros(count, int)
        if not made:
            return out
        at = [np.asarray(s.at) for s in made]
        rows = np.concatenate(
            [np.stack(np.broadcast_arrays(*self.volumes.columns(s), x)[:-1], 1) for s, x in zip(made, at, strict=True)]
        )
        rows[:, 1] = self._group.of(rows[:, 1])
        first, number = distinct(*rows.T)
        (stage, known), moves = self._counts, once(np.concatenate(at))
        self._counts = [stage + first.size, known + moves.size]
        self._stages = roomy(self._stages, len(self._stages), self._counts[0])
        self._steps = roomy(self._steps, len(self._steps), self._counts[1])
        self._stages[: rows.shape[1], stage : self._counts[0]] = rows[first].T
        out[moves] = known + np.arange(moves.size)
        begin = 0
        for x in at:
            self._steps[step[x], out[x]] = stage + number[begin : begin + x.size]
            step[x], begin = step[x] + 1, begin + x.size
        return out

    def communicates(self, transition: int) -> bool:
        """Whether a numbered transition is more than slices."""
        steps = self._steps[:, transition]
        return bool((self._stages[0, steps[steps > 0]] != KINDS.index("slice")).any())

    def seconds(self, asked: Sequence[tuple[tuple[int, ...], int, Ints]]) -> list[Floats]:
        """Seconds of arrays of numbered transitions of tensors: for each its shape, bytes per element, and the transitions."""
        alike: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for i, (shape, item, _) in enumerate(asked):
            alike.setdefault((shape, item), []).append(i)
        one = (1,) * self.cuts.has_at  # stages may have a case for where the tensor is, too
        found = []
        for (shape, item), each in alike.items():
            which = used(self._counts[1], *(asked[i][2] for i in each))
            steps = list(takewhile(np.any, (s[which] for s in self._steps)))
            stage = used(self._counts[0], *steps)
            stage = stage[stage > 0]
            found.append((item, which, steps, stage, self.volumes.rows((*shape, *one)), self._stages[:, stage]))
        self.volumes.count((rows, columns) for *_, rows, columns in found)
        out: dict[int, Floats] = {}
        for each, (item, which, steps, stage, rows, columns) in zip(alike.values(), found, strict=True):
            price, total = np.zeros(self._counts[0]), np.zeros(self._counts[1])
            price[stage] = self.stage_seconds(rows, item, columns)
            total[which] = sum(price[s] for s in steps)
            out.update((i, total[asked[i][2]]) for i in each)
        return [out[i] for i in range(len(asked))]

    def stage_seconds(self, rows: Sequence[Many], item: Many, columns: Ints) -> Floats:
        """Seconds of stages, packing and unpacking included (see `MoveVolumes.volumes`)."""
        sent, messages, after = self.volumes.volumes(rows, columns)
        plain, cut = self.machine.copy_seconds(after * item), self.volumes.cut_rows
        out = (
            self.machine.copy_seconds(after * item, cut(rows, columns)) if self.machine.columns_differ else plain.copy()
        )
        sent, start = sent * item, self.machine.file.compute.starts.get("slice", 0.0)
        for kind, at in by_kind(columns[0]):
            if kind == "slice":
                out[at] += start
                continue
            moved = np.minimum(*(t.seconds(sent[at], messages[at]) for t in self.terms(kind, columns[1, at])))
            if kind == "allreduce":
                out[at] = 0
            elif kind == "reduce_scatter":  # the blocks of all are packed, not only that which stays
                out[at] += (columns[2, at] - 1) * (out - plain)[at]
            out[at] += moved
        return out


def by_kind(kinds: Ints) -> Iterator[tuple[MoveKind, Any]]:
    """Kinds of moves that occur, and where: a slice where they are next to each other, as in stages that were numbered together."""
    for code in np.flatnonzero(np.bincount(kinds)).tolist():
        at = np.flatnonzero(kinds == code)
        yield KINDS[code], slice(at[0], at[-1] + 1) if at[-1] - at[0] < at.size else at


def used(count: int, *arrays: Ints) -> Ints:
    """Those of so many numbers that occur."""
    if 0 < 16 * sum(a.size for a in arrays) < count:
        return once(np.concatenate([a.reshape(-1) for a in arrays]))
    flags = np.zeros(count, bool)
    for a in arrays:
        flags[a] = True
    return np.flatnonzero(flags)


def _renumbered(d: Dim, number: Mapping[int, int]) -> Cut:
    axes = tuple(tuple(number[a] for a in each) for each in d.axes)
    return axes, None if _plain(d) else d


def _dim(cut: Cut, extent: int) -> Dim:
    return Dim(extent, (extent,), cut[0]) if cut[1] is None else replace(cut[1], axes=cut[0])


def _parts(d: Dim, grid: Grid) -> int:
    """Of a plain cut its number of parts, of another one the size of its largest block, negative (see `block_size`)."""
    return grid.ways(d.all_axes) if _plain(d) else -longest(d, grid)


@lru_cache(maxsize=1 << 8)
def _grid(sizes: tuple[int, ...]) -> Grid:
    return Grid(sizes)


def _plain(d: Dim) -> bool:
    return d.window is None and len(d.factors) == 1 and d.at is None


@lru_cache(maxsize=8)
def move_prices(machine: Machine, grid: Grid) -> MovePrices:
    """The prices of moves on a grid of a machine."""
    return MovePrices(machine, grid)


@lru_cache(maxsize=8)
def move_volumes(grid: Grid) -> MoveVolumes:
    """The volumes of moves on a grid."""
    return MoveVolumes(grid)


def _stage(move: Move) -> Stage:
    cuts, n = cuts_of(move.src.grid), len(move.src.dims) + (not move.src.at is move.dst.at is None)
    src, dst = (tuple(cuts.number(d) for d in x.cuts[:n]) for x in (move.src, move.dst))
    return Stage(move.kind, bits(move.axes), src, dst)


def prices_of_moves(asked: Collection[tuple[Move, int]], machine: Machine) -> list[tuple[float, int, int]]:
    """Seconds, bytes and messages of moves on one grid, the two latter of the busiest rank; with each its bytes per element."""
    if not asked:
        return []
    prices = move_prices(machine, next(iter(asked))[0].src.grid)
    most = prices.volumes.busiest(move for move, _ in asked)
    seconds = zip(asked, prices.of_moves(asked), strict=True)
    return [(s, most[move].elements * item, most[move].messages) for (move, item), s in seconds]


def move_price(move: Move, item: int, machine: Machine) -> tuple[float, int, int]:
    """Seconds, bytes and messages of a move, the two latter of the busiest rank; ``item`` is bytes per element."""
    return prices_of_moves([(move, item)], machine)[0]


def busiest(move: Move) -> Volume:
    """What the rank that sends most in a move sends (see `MoveVolumes.busiest`)."""
    return move_volumes(move.src.grid).busiest([move])[move]
