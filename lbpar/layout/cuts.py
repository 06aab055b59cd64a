"""Cuts of a dimension by number, and what `lbpar.layout.transition` asks of pairs of them; sets of grid axes as bits.

Every function takes integers or integer arrays, so that one rule serves a single move and tables over all pairs of a planner's layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Dim, Ints
from lbpar.layout.runs import Many


def bits(axes: Axes) -> int:
    """A set of axes as bits."""
    out = 0
    for a in axes:
        out |= 1 << a
    return out


def pick(where: Many, a: Many, b: Many) -> Many:
    """``a`` where a condition holds, else ``b``."""
    return np.where(where, a, b) if isinstance(where, np.ndarray) else a if where else b


def distinct(*columns: Ints) -> tuple[Ints, Ints]:
    """Where each different row of some columns of integers is first met, and which of them every row is."""
    key, bound = np.zeros(columns[0].shape, np.int64), 1
    for c in columns:
        size = int(c.max(initial=0)) + 1
        if bound * size >= 1 << 62:
            key = np.unique(key, return_inverse=True)[1]
            bound = int(key.max()) + 1
        key, bound = key * size + c, bound * size
    if bound > 4 * key.size:
        _, first, index = np.unique(key, return_index=True, return_inverse=True)
        return first, index.reshape(-1)
    number = np.full(bound, -1)  # few numbers need no sorting
    number[key[::-1]] = np.arange(key.size)[::-1]
    found = np.flatnonzero(number >= 0)
    first = number[found]
    number[found] = np.arange(found.size)
    return first, number[key]


def once(numbers: Ints) -> Ints:
    """Different ones of some integers, sorted (faster than `numpy.unique`, which hashes them)."""
    numbers = np.sort(numbers, axis=None)
    return numbers[np.diff(numbers, prepend=numbers[:1] - 1) != 0]


def by_row(*columns: Many) -> tuple[list[tuple[int, ...]], Many]:
    """The different rows of some columns of integers, and which of them every row is; one row of numbers is itself."""
    if not any(isinstance(c, np.ndarray) for c in columns):
        return [columns], 0
    first, index = distinct(*columns)
    return list(zip(*(c[first].tolist() for c in columns), strict=True)), index


def by_value(f: Callable[..., Any], *columns: Ints) -> Any:
    """``f`` of rows of integers, called once for each row that occurs; equal rows share the answer."""
    rows, index = by_row(*columns)
    return np.array([f(*row) for row in rows])[index]


class Numbering:
    """Numbers things as they come; ``things`` has them by number."""

    def __init__(self, *things: Hashable) -> None:
        self.things: list[Any] = []
        self._numbers: dict[Hashable, int] = {}
        for thing in things:
            self(thing)

    def __call__(self, thing: Hashable) -> int:
        number = self._numbers.get(thing)
        if number is None:
            number = self._numbers[thing] = len(self.things)
            self.things.append(thing)
        return number

    def of(self, numbers: Ints) -> list[Any]:
        """The things with some numbers."""
        return [self.things[i] for i in numbers.tolist()]


class Pair(NamedTuple):
    """How a dimension goes from one cut to another.

    ``sliced``: the cut that slicing alone leads to (the first one if it cannot); ``before``, ``after``: axes that leave and that come;
    ``scatters``: other blocks are wanted, not only larger ones; ``halo``: only ghosts are missing; ``at``: from or to one coordinate.
    """

    sliced: Many
    before: Many
    after: Many
    scatters: Many
    halo: Many
    at: Many


class Cuts:
    """Numbers the cuts of dimensions on one grid; 0 is not to cut.

    Plain cuts have one number for all extents; those with ghosts or several loops, and those that leave all to one part, have one for
    every `Dim`. ``has_at`` says whether there are any of the last kind.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.everything = (1 << len(grid.sizes)) - 1
        self.has_at = False
        self._dims: list[Dim] = []
        self._numbers: dict[Axes | Dim, int] = {}
        self._masks: list[int] = []
        self._plain: list[int] = []
        self._arrays: tuple[Ints, Ints] | None = None
        self._pairs: dict[tuple[int, int], Pair] = {}
        self._sums: dict[tuple[int, int, int, int], int] = {}
        self._tables: list[NDArray[Any]] = []
        self.indexed: dict[Any, int] = {}  # cuts that loops give an index, of `lbpar.layout.many`
        self.places = Numbering()  # of layouts: numbers of the cuts of their dimensions, and partial axes as bits
        self.number(Dim.whole(1))

    def __len__(self) -> int:
        return len(self._dims)

    def number(self, dim: Dim) -> int:
        """The number of a cut."""
        key = dim.axes[0] if _plain(dim) else dim
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = len(self._dims)
            self._dims.append(dim)
            self._masks.append(bits(dim.all_axes))
            self._plain.append(known if dim.window is None else self.number(dim.plain))
            self.has_at |= dim.at is not None
            self._arrays = None
        return known

    def of(self, axes: Axes) -> int:
        """The number of the plain cut by some axes."""
        known = self._numbers.get(axes)
        return self.number(Dim(1, (1,), (axes,))) if known is None else known

    def dim(self, number: int, extent: int) -> Dim:
        """What a number means for a dimension of some extent."""
        dim = self._dims[number]
        return Dim(extent, (extent,), dim.axes) if _plain(dim) else dim

    def axes(self, mask: int) -> Axes:
        """A set of axes in increasing order."""
        return tuple(a for a in self.grid.axes if mask >> a & 1)

    def _lists(self) -> tuple[Ints, Ints]:
        if self._arrays is None:
            self._arrays = (np.array(self._masks), np.array(self._plain))
        return self._arrays

    def mask(self, cut: Many) -> Many:
        """Axes that cut, as bits."""
        return self._lists()[0][cut] if isinstance(cut, np.ndarray) else self._masks[cut]

    def plain(self, cut: Many) -> Many:
        """The same without ghosts."""
        return self._lists()[1][cut] if isinstance(cut, np.ndarray) else self._plain[cut]

    def ghosts(self, cut: Many) -> Many:
        """Whether a cut has ghosts."""
        return self.plain(cut) != cut

    def has_ghosts(self, place: int) -> bool:
        """Whether a layout, by number, has any."""
        *dims, _ = self.places.things[place]
        return any(self.ghosts(c) for c in dims)

    def pair(self, c: Many, d: Many) -> Pair:
        """How a dimension cut by ``c`` becomes cut by ``d``."""
        if not isinstance(c, np.ndarray) and not isinstance(d, np.ndarray):
            known = self._pairs.get((c, d))
            if known is None:
                known = self._pairs[c, d] = self._pair(c, d)
            return known
        n = len(self)
        if not self._tables or self._tables[0].size < n * n:
            self._width = 2 * n
            self._tables = [np.zeros(4 * n * n, t) for t in (np.int32, np.int32, np.int32, bool, bool, bool, bool)]
        at = np.asarray(c * self._width + d)
        known_at = self._tables[-1][at]
        if not known_at.all():
            for flat in once(at[~known_at]).tolist():
                values = self.pair(*divmod(flat, self._width))
                for table, value in zip(self._tables, (*values, True), strict=True):
                    table[flat] = value
        return Pair(*(t[at] for t in self._tables[:-1]))

    def _pair(self, c: int, d: int) -> Pair:
        if c == d:
            return Pair(c, 0, 0, False, False, False)
        x, y = self._dims[c], self._dims[d]
        at = x.at is not None or y.at is not None
        one = _plain(x) and len(y.factors) == 1 and not at
        kept = 0  # leading axes along which both cut alike, so that no data crosses them
        if one and y.window is None:
            for a, b in zip(x.all_axes, y.all_axes, strict=False):
                if a != b:
                    break
                kept += 1
        # The whole extent is cut as needed, ghosts included.
        sliced = d if not x.all_axes else self._plain[d] if one and _extends(y.all_axes, x.all_axes) else c
        scatters = kept < len(y.all_axes) or y.window is not None
        halo = y.window is not None and x.window is None and x.axes == y.axes
        return Pair(sliced, bits(x.all_axes[kept:]), bits(y.all_axes[kept:]), scatters, halo, at)

    def scattered(self, c: Many, d: Many, todo: Many, free: Many) -> Many:
        """The cut after partial sums over the axes ``todo`` are scattered towards ``d``; ``free`` axes hold copies."""
        new = todo & self.mask(d)
        at_once = (self.mask(d) & ~self.mask(c) & ~(todo | free)) == 0
        if not isinstance(new, np.ndarray):
            return self._scattered(c, d, new, at_once)
        out = np.array(np.broadcast_to(c, new.shape))
        at = np.nonzero(new)
        columns = [np.broadcast_to(v, new.shape)[at] for v in (c, d, new, at_once)]
        if columns[0].size:
            out[at] = by_value(self._scattered, *columns)
        return out

    def _scattered(self, c: int, d: int, new: int, at_once: int) -> int:
        key = (c, d, new, at_once)
        known = self._sums.get(key)
        if known is None:
            known = self._sums[key] = self._scatter(*key)
        return known

    def _scatter(self, c: int, d: int, new: int, at_once: int) -> int:
        x, y = self._dims[c], self._dims[d]
        if not new or x.window is not None:
            return c
        one = _plain(x) and len(y.factors) == 1 and y.at is None
        if at_once and (not x.all_axes or (one and _extends(y.all_axes, x.all_axes))):
            return self._plain[d]
        return self.of((*x.all_axes, *(a for a in y.all_axes if new >> a & 1))) if one else c


def _plain(dim: Dim) -> bool:
    return dim.window is None and len(dim.factors) == 1 and dim.at is None


def _extends(longer: Axes, shorter: Axes) -> bool:
    return len(longer) > len(shorter) and longer[: len(shorter)] == shorter


@lru_cache(maxsize=64)
def cuts_of(grid: Grid) -> Cuts:
    """The numbers of cuts on a grid."""
    return Cuts(grid)
