"""Seconds of moves between layouts, for one pair or for arrays of them: the one place where communication is priced.

Seconds are those of the largest blocks, dimension by dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from lbpar.cost.machine import Machine, Term
from lbpar.cost.traffic import largest_exchange, longest, traffic
from lbpar.layout.cuts import Ints, Many, bits, by_row, cuts_of
from lbpar.layout.exchange import Volume
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Dim
from lbpar.layout.transition import Move, MoveKind, Stage

Floats = NDArray[np.float64]
#: Processes up to which bytes and messages are counted rank by rank.
COUNTED = 4096
#: Axes, and the dimension itself where ghosts or several loops make it more than a plain cut.
Cut = tuple[tuple[Axes, ...], Dim | None]


class MoveVolumes:
    """Counts what moves on one grid send."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.cuts = grid, cuts_of(grid)
        self.ways = np.ones(self.cuts.everything + 1)
        for a in grid.axes:
            self.ways[np.arange(self.ways.size) >> a & 1 == 1] *= grid.sizes[a]
        self._lengths: dict[int, Ints] = {}
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._keys: dict[tuple[Cut, Cut, Axes, Grid], int] = {}
        self._of_stage: dict[Stage, list[tuple[Ints, Many]]] = {}
        self._tables: dict[int, Ints] = {}

    def lengths(self, extent: int) -> Ints:
        """Most indices that a rank holds of a dimension, by number of its cut."""
        known = self._lengths.get(extent, np.zeros(0, int))
        if known.size < len(self.cuts):
            more = [longest(self.cuts.dim(c, extent), self.grid) for c in range(known.size, len(self.cuts))]
            known = self._lengths[extent] = np.concatenate([known, np.array(more, int)])
        return known

    def size(self, shape: tuple[int, ...], cuts: tuple[Many, ...]) -> Many:
        """Elements of the largest block."""
        return prod((self.lengths(e)[c] for e, c in zip(shape, cuts, strict=True)), start=1)

    def volume(self, s: Stage, shape: tuple[int, ...]) -> tuple[Many, Many]:
        """Elements and messages that the busiest rank sends, the largest blocks being taken in every dimension."""
        p = self.ways[s.axes]
        if s.kind == "slice":
            return 0 * p, 0 * p
        if s.kind == "allreduce":
            return 2 * self.size(shape, s.dst) * (p - 1) / p, 2 * (p - 1)
        if s.kind in ("reduce_scatter", "allgather"):
            return self.size(shape, s.dst if s.kind == "reduce_scatter" else s.src) * (p - 1), p - 1
        goal: Many = 0
        for d in s.dst:
            goal = goal | self.cuts.mask(d)
        sent = readers = self.ways[s.axes & ~goal]
        kept: Many = 1
        for extent, (cases, which) in zip(shape, self._cases(s), strict=True):
            total, count, own = self._exchanges(extent, cases)[:, which]
            sent, readers, kept = sent * total, readers * count, kept * own
        return sent - kept, readers - (kept > 0)

    def _cases(self, s: Stage) -> list[tuple[Ints, Many]]:
        """For each dimension numbers of the different ways in which it is exchanged, and which of them each pair of layouts has."""
        known = self._of_stage.get(s)
        if known is None:
            known = []
            for d in range(len(s.src)):
                moved = s.axes & self.cuts.mask(s.dst[d])
                rows, which = by_row(s.src[d], s.dst[d], moved)
                known.append((np.array([self._case(*row) for row in rows]), which))
            self._of_stage[s] = known
        return known

    def _case(self, c: int, d: int, moved: int) -> int:
        """The number of two cuts and a set of axes. Only how the cuts share axes matters, not which axes they are."""
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
            known = self._numbers[c, d, moved] = self._keys.setdefault(key, len(self._keys))
        return known

    def _exchanges(self, extent: int, cases: Ints) -> Ints:
        """`largest_exchange` of one dimension, for each of some cases."""
        table = self._tables.get(extent)
        if table is None or table.shape[1] < len(self._keys):
            grown = np.full((3, 2 * len(self._keys)), -1)
            if table is not None:
                grown[:, : table.shape[1]] = table
            table = self._tables[extent] = grown
        missing = cases[table[0, cases] < 0]
        if missing.size:
            keys = list(self._keys)
            for i in missing.tolist():
                table[:, i] = _exchange(extent, *keys[i])
        return table[:, cases]


class MovePrices(MoveVolumes):
    """Prices moves on one grid of one machine."""

    def __init__(self, machine: Machine, grid: Grid) -> None:
        super().__init__(grid)
        self.machine = machine
        self._terms: dict[MoveKind, Floats] = {}

    def terms(self, kind: MoveKind, axes: Many) -> tuple[Term, Term]:
        """`Machine.terms` of groups over sets of axes."""
        known = self._terms.get(kind)
        if known is None:
            groups = [self.machine.parts(self.grid, self.cuts.axes(m)) for m in range(self.ways.size)]
            known = self._terms[kind] = np.array([self.machine.terms(kind, parts) for parts in groups])
        first, second = np.moveaxis(known[axes], (-2, -1), (0, 1))
        return Term(*first), Term(*second)

    def collective(self, kind: MoveKind, axes: Many, sent: Many, messages: Many) -> Many:
        """Seconds of a collective, bytes and messages of the busiest rank being given."""
        first, second = (t.seconds(sent, messages) for t in self.terms(kind, axes))
        return np.minimum(first, second)

    def stage(self, s: Stage, shape: tuple[int, ...], item: int) -> Many:
        """Seconds of one stage of a transition, packing and unpacking included; ``item`` is bytes per element."""
        copies = self.machine.copy_seconds(self.size(shape, s.dst) * item) if s.kind != "allreduce" else 0.0
        if s.kind == "slice":
            return copies
        sent, messages = self.volume(s, shape)
        return self.collective(s.kind, s.axes, sent * item, messages) + copies


def _renumbered(d: Dim, number: Mapping[int, int]) -> Cut:
    axes = tuple(tuple(number[a] for a in each) for each in d.axes)
    return axes, d if d.window is not None or len(d.factors) > 1 else None


def _exchange(extent: int, s: Cut, t: Cut, axes: Axes, grid: Grid) -> tuple[int, int, int]:
    plain = s[1] is t[1] is None
    # Blocks of an extent that all axes divide are multiples of those of the smallest such extent.
    scale = extent // grid.size if plain and extent % grid.size == 0 else 1
    least = extent // scale
    src, dst = (Dim(least, (least,), a) if d is None else replace(d, axes=a) for a, d in (s, t))
    sent, readers, kept = largest_exchange(src, dst, axes, grid)
    return sent * scale, readers, kept * scale


@lru_cache(maxsize=8)
def move_prices(machine: Machine, grid: Grid) -> MovePrices:
    """The prices of moves on a grid of a machine."""
    return MovePrices(machine, grid)


@lru_cache(maxsize=8)
def _volumes(grid: Grid) -> MoveVolumes:
    return MoveVolumes(grid)


def _stage(move: Move) -> Stage:
    cuts = cuts_of(move.src.grid)
    src, dst = (tuple(cuts.number(d) for d in x.dims) for x in (move.src, move.dst))
    return Stage(move.kind, bits(move.axes), src, dst)


@lru_cache(maxsize=1 << 15)
def busiest(move: Move) -> Volume:
    """What the rank that sends most in a move sends: exact up to `COUNTED` processes, that of the largest blocks beyond."""
    if move.src.grid.size <= COUNTED:
        return traffic(move).busiest
    sent, messages = _volumes(move.src.grid).volume(_stage(move), move.src.shape)
    return Volume(int(messages), int(sent))


@lru_cache(maxsize=1 << 15)
def move_price(move: Move, item: int, machine: Machine) -> tuple[float, int, int]:
    """Seconds, bytes and messages of a move, the two latter of the busiest rank; ``item`` is bytes per element."""
    seconds = float(move_prices(machine, move.src.grid).stage(_stage(move), move.src.shape, item))
    return seconds, busiest(move).elements * item, busiest(move).messages
