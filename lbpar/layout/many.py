"""Layouts that many op grids give one tensor, as arrays: what the planner lowers and prices at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lbpar.graph.loops import Index, Kernel, Operand, Shape
from lbpar.layout.cuts import Cuts, Ints, by_value, cuts_of, distinct
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Dim, open_loops

#: Loop name -> number of its (plain) cut in every op grid.
OpGrids = Mapping[str, Ints]


@dataclass(frozen=True, eq=False)
class Layouts:
    """One `Layout` for each of many op grids.

    Parameters
    ----------
    grid : Grid
        The processes.
    shape : tuple of int
        Global shape.
    dims : tuple of int arrays
        Numbers of the cuts (`lbpar.layout.cuts`) of every dimension.
    partial : int array
        Axes along which values are still to be combined, as bits.
    at : int array, optional
        Numbers of the cuts that say where each is (`Layout.at`); everywhere by default.
    """

    grid: Grid
    shape: Shape
    dims: tuple[Ints, ...]
    partial: Ints
    at: Ints | None = None

    @classmethod
    def of(
        cls,
        operand: Operand,
        kernel: Kernel,
        grid: Grid,
        op_grids: OpGrids,
        *,
        written: bool = False,
        at: Ints | None = None,
    ) -> Layouts:
        """`Layout.of` for many op grids."""
        cuts, extents = cuts_of(grid), dict(kernel.loops)
        none = np.zeros_like(next(iter(op_grids.values()), np.zeros(1, np.int64)))
        dims = tuple(_cut(cuts, i, extents, op_grids, none) for i in operand.dims)
        partial = none
        for loop in open_loops(operand, kernel, written):
            partial = partial | cuts.mask(op_grids.get(loop, none))
        return cls(grid, operand.shape, dims, partial, at)

    @property
    def columns(self) -> tuple[Ints, ...]:
        """Numbers of all cuts (`Layout.cuts`, without the last one where all are everywhere), and the partial axes."""
        return (*self.dims, *(() if self.at is None else (self.at,)), self.partial)

    def take(self, keep: Ints) -> Layouts:
        """Some of them."""
        at = None if self.at is None else self.at[keep]
        some = replace(self, dims=tuple(d[keep] for d in self.dims), partial=self.partial[keep], at=at)
        some.__dict__["numbers"] = self.numbers[keep]
        return some

    @cached_property
    def complete(self) -> Layouts:
        """With all sums done."""
        return replace(self, partial=np.zeros_like(self.partial))

    @property
    def plain(self) -> Layouts:
        """Without ghosts."""
        return replace(self, dims=tuple(cuts_of(self.grid).plain(d) for d in self.dims))

    @cached_property
    def has_ghosts(self) -> bool:
        """Whether any has."""
        return any(cuts_of(self.grid).ghosts(d).any() for d in self.dims)

    @cached_property
    def classes(self) -> tuple[Layouts, Ints]:
        """The different ones, and which of them every one is."""
        first, index = distinct(*self.columns)
        at = None if self.at is None else self.at[first]
        return Layouts(self.grid, self.shape, tuple(d[first] for d in self.dims), self.partial[first], at), index

    @cached_property
    def numbers(self) -> Ints:
        """Of every one its number on this grid (`Cuts.places`)."""
        places = cuts_of(self.grid).places
        return by_value(lambda *row: places(row), *self.columns)

    @cached_property
    def key(self) -> tuple[object, ...]:
        return (self.shape, *(c.tobytes() for c in self.columns))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layouts) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _cut(cuts: Cuts, index: Index, extents: Mapping[str, int], op_grids: OpGrids, none: Ints) -> Ints:
    loops = [loop for loop in index.loops if loop in op_grids]
    if not loops:
        return none
    if len(index.loops) == 1 and index.window is None:
        return op_grids[loops[0]]

    def number(*chosen: int) -> int:
        key = (index, tuple(extents[loop] for loop in index.loops), chosen)
        if key not in cuts.indexed:
            op_grid = {loop: cuts.dim(c, extents[loop]).all_axes for loop, c in zip(loops, chosen, strict=True)}
            cuts.indexed[key] = cuts.number(Dim.of(index, extents, cuts.grid, op_grid))
        return cuts.indexed[key]

    return by_value(number, *(op_grids[loop] for loop in loops))
