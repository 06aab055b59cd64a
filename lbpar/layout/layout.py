"""A layout says, for each grid axis, whether a tensor is sharded, replicated or partial along it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lbpar.graph.loops import Index, Kernel, Operand, Window
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.runs import Box, Runs, block, box_shape, expand, run

Ints = NDArray[np.signedinteger[Any]]
OpGrid = Mapping[str, Axes]  # loop name -> the axes that split it, major first


@dataclass(frozen=True)
class Dim:
    """How one dimension of a tensor is cut.

    Parameters
    ----------
    extent : int
        Extent of the tensor's dimension.
    factors : tuple of int
        Extents of the loops that index it, major to minor (their product is the extent, but for windows).
    axes : tuple of Axes
        For each factor, the grid axes that split it, major first. Cuts are nested: each axis cuts the block that the
        axes before it left, by the one block rule, so dropping the last axes gives blocks that are unions of blocks.
    window : Window, optional
        The held indices are those that the loop's block reads through the window (``transposed``: that read it).
    at : int, optional
        The one part, of all that the axes make, that holds everything; the others are empty.
    """

    extent: int
    factors: tuple[int, ...]
    axes: tuple[Axes, ...]
    window: Window | None = None
    transposed: bool = False
    at: int | None = None

    @classmethod
    def of(cls, index: Index, extents: Mapping[str, int], grid: Grid, op_grid: OpGrid) -> Dim:
        """The cut that an op grid gives an indexed dimension, in its simplest form."""
        axes = tuple(tuple(op_grid.get(loop, ())) for loop in index.loops)
        return _cut(index, tuple(extents[loop] for loop in index.loops), axes, grid)

    @classmethod
    def whole(cls, extent: int) -> Dim:
        """A dimension that is not cut."""
        return cls(extent, (extent,), ((),))

    @classmethod
    def only(cls, axes: Axes, part: int) -> Dim:
        """What is at one coordinate, ``At(part)``: see `Layout.at`."""
        return cls(1, (1,), (axes,), at=part)

    @cached_property
    def all_axes(self) -> Axes:
        """Every axis that cuts this dimension."""
        return tuple(a for axes in self.axes for a in axes)

    @property
    def plain(self) -> Dim:
        """The same cut without ghosts: blocks of the dimension itself on the same axes."""
        return self if self.window is None else Dim(self.extent, (self.extent,), (self.all_axes,))

    def parts(self, grid: Grid, coords: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The block of each loop at the given coordinates."""
        if self.at is not None:
            part = 0
            for a in self.all_axes:
                part = part * grid.sizes[a] + coords[a]
            return ((0, self.extent if part == self.at else 0),)
        out = []
        for extent, axes in zip(self.factors, self.axes, strict=True):
            lo, hi = 0, extent
            for a in axes:
                lo, hi = block(lo, hi, grid.sizes[a], coords[a])
            out.append((lo, hi))
        return tuple(out)

    def runs(self, grid: Grid, coords: tuple[int, ...]) -> Runs:
        """Indices held at the given coordinates."""
        parts = self.parts(grid, coords)
        if self.window is not None:
            hull = self.window.preimage if self.transposed else self.window.image
            return run(*hull(*parts[0], self.extent))
        if len(parts) == 1:
            return run(*parts[0])
        return expand(parts, self.factors)


@dataclass(frozen=True)
class Layout:
    """Where each element of a tensor lives.

    Parameters
    ----------
    grid : Grid
        The processes.
    dims : tuple of Dim
        One per tensor dimension, in memory order.
    partial : Axes
        Axes along which the held values are still to be combined (or, for statistics of a group, differ on purpose).
    reduce : {"sum", "max"}
        How partial values are combined.
    at : Dim, optional
        Along its axes the tensor is at one coordinate (``At(k)``, `Dim.only`): ranks elsewhere hold an empty block. It is one more
        dimension, of extent 1, that every rank but those at the coordinate has nothing of.

    Examples
    --------
    >>> grid = Grid((2, 2))
    >>> y = Layout(grid, (Dim(5, (5,), ((1,),)), Dim(8, (8,), ((),))), partial=(0,))
    >>> str(y)
    '[5, 8] 0:P 1:S(0)'
    >>> y.box(3)
    (((3, 5),), ((0, 8),))
    """

    grid: Grid
    dims: tuple[Dim, ...]
    partial: Axes = ()
    reduce: Literal["sum", "max"] = "sum"
    at: Dim | None = None

    @classmethod
    def of(
        cls,
        operand: Operand,
        kernel: Kernel,
        grid: Grid,
        op_grid: OpGrid,
        *,
        written: bool = False,
        at: Dim | None = None,
    ) -> Layout:
        """The layout that an op grid gives an operand of a kernel (design: shard where indexed, else replicate or partial).

        A written operand is partial along the axes of loops of the kernel that do not index it; a read one is
        complete, except along the axes of its ``varying`` loops. All are where the kernel runs (``at``).
        """
        extents = dict(kernel.loops)
        dims = tuple(Dim.of(i, extents, grid, op_grid) for i in operand.dims)
        partial = tuple(sorted(a for loop in open_loops(operand, kernel, written) for a in op_grid.get(loop, ())))
        return cls(grid, dims, partial, operand.reduce, at)

    @classmethod
    def replicated(cls, grid: Grid, shape: tuple[int, ...]) -> Layout:
        """Every rank holds the whole tensor."""
        return cls(grid, tuple(Dim.whole(e) for e in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(d.extent for d in self.dims)

    @cached_property
    def shard_axes(self) -> Axes:
        """Axes along which blocks differ, in increasing order."""
        return tuple(sorted({a for d in self.cuts for a in d.all_axes}))

    @cached_property
    def cuts(self) -> tuple[Dim, ...]:
        """All that cuts it: its dimensions, and last where it is."""
        return (*self.dims, self.at or EVERYWHERE)

    def holds(self, rank: int) -> bool:
        """Whether a rank is where the tensor is; its block may be empty all the same."""
        return self.at is None or self.at.runs(self.grid, self.grid.coords(rank)) != ()

    @property
    def complete(self) -> Layout:
        """The same blocks with all sums done: the layout of this tensor's gradient."""
        return replace(self, partial=(), reduce="sum") if self.partial or self.reduce != "sum" else self

    @property
    def plain(self) -> Layout:
        """The same cuts without ghosts."""
        return replace(self, dims=tuple(d.plain for d in self.dims))

    @property
    def has_ghosts(self) -> bool:
        """Whether blocks may overlap or leave gaps, because of a window."""
        return any(d.window is not None for d in self.dims)

    def owns(self, rank: int) -> bool:
        """Whether a rank is the first of those that hold its block; its values stand for those of all replicas."""
        coords = self.grid.coords(rank)
        return all(coords[a] == 0 for a in self.grid.axes if a not in self.shard_axes)

    def placement(self, axis: int) -> str:
        """``S(dim)``, ``@part``, ``R`` or ``P`` along one grid axis."""
        if self.at is not None and axis in self.at.all_axes:
            return f"@{self.at.at}"
        for i, d in enumerate(self.dims):
            if axis in d.all_axes:
                return f"S({i})"
        return "P" if axis in self.partial else "R"

    def box(self, rank: int) -> Box:
        """Global indices that a rank holds, per dimension."""
        return _box(self, rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the array that a rank holds."""
        return box_shape(_box(self, rank))

    def __str__(self) -> str:
        marks = " ".join(f"{a}:{self.placement(a)}" for a in self.grid.axes if self.placement(a) != "R")
        ghosts = " +ghosts" if self.has_ghosts else ""
        return f"{list(self.shape)}{' ' + marks if marks else ''}{ghosts}"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.grid, self.dims, self.partial, self.reduce, self.at))


#: Of a tensor that is not at one coordinate only: `Layout.cuts`.
EVERYWHERE = Dim.whole(1)


def open_loops(operand: Operand, kernel: Kernel, written: bool) -> tuple[str, ...]:
    """Loops along whose axes a kernel leaves an operand partial (or different on purpose)."""
    own = {loop for i in operand.dims for loop in i.loops}
    summed = (loop for loop, _ in kernel.loops if loop not in own and loop not in operand.varying)
    return (*operand.varying, *summed) if written else operand.varying


@lru_cache(maxsize=1 << 10)
def _nested(extent: int, sizes: tuple[int, ...]) -> tuple[Ints, Ints]:
    """First and last+1 index of the blocks that nested cuts make, those of the last cut next to each other."""
    if not sizes:
        return np.zeros(1, np.int64), np.full(1, extent)
    lo, hi = (x[:, None] for x in _nested(extent, sizes[:-1]))
    lo, hi = block(lo, hi, sizes[-1], np.arange(sizes[-1]))
    return lo.reshape(-1), hi.reshape(-1)


@lru_cache(maxsize=1 << 7)
def blocks(dim: Dim, grid: Grid) -> tuple[Ints, Ints]:
    """First and last+1 index held at all coordinates along the axes of a dimension of one factor, the last axis running fastest.

    (0, 0) where a window finds nothing.
    """
    if dim.at is not None:
        there = np.arange(grid.ways(dim.all_axes)) == dim.at
        return np.zeros(there.size, np.int64), there * dim.extent
    lo, hi = _nested(dim.factors[0], tuple(grid.sizes[a] for a in dim.all_axes))
    w = dim.window
    if w is None:
        return lo, hi
    if dim.transposed:
        first = np.maximum(0, -((w.reach - lo - w.pad) // w.stride))
        last = np.minimum(dim.extent, (hi - 1 + w.pad) // w.stride + 1)
    else:
        first = np.maximum(0, lo * w.stride - w.pad)
        last = np.minimum(dim.extent, (hi - 1) * w.stride - w.pad + w.reach + 1)
    some = (hi > lo) & (last > first)
    return first * some, last * some


@lru_cache(maxsize=1 << 14)
def _cut(index: Index, factors: tuple[int, ...], axes: tuple[Axes, ...], grid: Grid) -> Dim:
    if not any(axes):
        return Dim.whole(index.extent)
    if index.window is not None:
        return _without_idle_window(Dim(index.extent, factors, axes, index.window, index.transposed), grid)
    # A factor of extent 1 that nothing cuts says nothing (a flatten of 1 x 1 maps is cut like its channels).
    real = [i for i, (e, a) in enumerate(zip(factors, axes, strict=True)) if e > 1 or a]
    factors, axes = tuple(factors[i] for i in real), tuple(axes[i] for i in real)
    if len(factors) > 1 and not any(axes[1:]) and factors[0] % grid.ways(axes[0]) == 0:
        return Dim(index.extent, (index.extent,), axes[:1])
    return Dim(index.extent, factors, axes)


@lru_cache(maxsize=1 << 14)
def _without_idle_window(dim: Dim, grid: Grid) -> Dim:
    """The plain cut, where the window reads just the blocks (a pool whose windows do not overlap, say)."""
    (lo, hi), (first, last) = blocks(dim, grid), blocks(dim.plain, grid)
    same = (hi - lo == last - first) & ((lo == first) | (hi == lo))
    return dim.plain if same.all() else dim


@lru_cache(maxsize=1 << 18)
def _box(layout: Layout, rank: int) -> Box:
    coords = layout.grid.coords(rank)
    if not layout.holds(rank):
        return ((),) * max(1, len(layout.dims))  # empty even where there is no dimension
    return tuple(d.runs(layout.grid, coords) for d in layout.dims)
