"""Cuts of one dimension, numbered, with what the planner asks of them; many candidates share a few cuts.

A cut is the tuple of axes that split a dimension, major first. Everything here is integer arithmetic on one dimension;
tables over pairs of cuts are what makes it cheap to price all pairs of candidate grids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.cost.traffic import bounds
from lbpar.graph.loops import Window
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Dim

Ints = NDArray[np.signedinteger[Any]]
Floats = NDArray[np.float64]


def mask_of(axes: Axes) -> int:
    """Set of axes as bits."""
    out = 0
    for a in axes:
        out |= 1 << a
    return out


class Cuts:
    """Numbers tuples of axes; cut 0 is the empty one."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.axes: list[Axes] = [()]
        self.number: dict[Axes, int] = {(): 0}
        self.masks: list[int] = [0]
        self.sizes: list[tuple[int, ...]] = [()]
        self.pairs: dict[tuple[int, int, int, bool], tuple[int, ...]] = {}
        self.structures: dict[Any, Any] = {}
        self._blocks: dict[int, Ints] = {}

    def add(self, axes: Axes) -> int:
        """The number of a cut."""
        known = self.number.get(axes)
        if known is None:
            known = self.number[axes] = len(self.axes)
            self.axes.append(axes)
            self.masks.append(mask_of(axes))
            self.sizes.append(tuple(self.grid.sizes[a] for a in axes))
        return known

    @property
    def capacity(self) -> int:
        """A power of two that the number of cuts does not pass."""
        return max(512, 1 << (len(self.axes) - 1).bit_length())

    def mask_array(self) -> Ints:
        """Bits of every cut."""
        return np.array(self.masks, np.int32)

    def ways(self) -> Ints:
        """Parts that every cut makes."""
        return np.array([prod(s) for s in self.sizes])

    def blocks(self, extent: int) -> Ints:
        """Longest block of every cut of an extent."""
        known = self._blocks.get(extent)
        if known is None or known.size < len(self.sizes):
            done = 0 if known is None else known.size
            new = np.array([block(extent, s) for s in self.sizes[done:]])
            known = self._blocks[extent] = new if known is None else np.concatenate([known, new])
        return known

    def pair(self, c: int, todo: int, free: int, d: int) -> tuple[int, ...]:
        """What `transition` does with one dimension: numbers as in `PAIR`.

        The dimension is cut by ``c`` and goes to ``d``; the tensor is partial over the axes ``todo`` and replicated over
        ``free`` (bits).
        """
        at_once = not self.masks[d] & ~self.masks[c] & ~(todo | free)
        key = (c, todo & self.masks[d], d, at_once)
        known = self.pairs.get(key)
        if known is None:
            known = self.pairs[key] = self._pair(*key)
        return known

    def _pair(self, c: int, todo: int, d: int, at_once: bool) -> tuple[int, ...]:
        cut, goal = self.axes[c], self.axes[d]
        new = tuple(a for a in goal if todo >> a & 1)
        extends = len(goal) > len(cut) and goal[: len(cut)] == cut
        after = goal if new and extends and at_once else cut + new
        c1 = self.add(after)
        kept = 0
        for a, b in zip(after, goal, strict=False):
            if a != b:
                break
            kept += 1
        sliceable = len(after) < len(goal) and kept == len(after)
        differ = tuple(b for a, b in zip(after, goal, strict=False) if a != b)
        return (
            c1,
            mask_of(new),
            int(sliceable),
            mask_of(after[kept:]),
            mask_of(goal[kept:]),
            int(kept == len(goal)),
            mask_of(goal[len(after) :]),
            mask_of(differ),
        )


#: The cut after partial sums are scattered; axes scattered; whether cutting further does; axes (as bits) that leave and that come;
#: whether leaving is all; the goal's axes beyond the cut's length; the goal's axes where both cut by different ones.
PAIR = ("c1", "scattered", "sliceable", "before", "after", "gathers", "tail", "differ")


@lru_cache(maxsize=1 << 16)
def block(extent: int, sizes: tuple[int, ...]) -> int:
    """Longest block of an extent under nested cuts of the given sizes."""
    for s in sizes:
        extent = -(-extent // s)
    return extent


@dataclass(frozen=True)
class Ghosts:
    """A cut dimension read through a window: does it need neighbours' indices, and how many, at the busiest place.

    ``held``: most indices needed; ``sent``: most (index, reader) pairs of one block, its own included; ``readers``: most blocks
    that read one; ``own``: what the busiest block needs of itself. The same of the way back (adding ghosts into owners):
    ``back_sent``, ``back_readers``, ``back_own``.
    """

    active: bool
    held: int
    sent: int
    readers: int
    own: int
    back_sent: int
    back_readers: int
    back_own: int


@lru_cache(maxsize=1 << 16)
def ghosts(extent: int, loop: int, sizes: tuple[int, ...], window: Window, transposed: bool) -> Ghosts:
    """Ghosts of a dimension of ``extent`` whose loop of extent ``loop`` is cut by ``sizes`` (major first)."""
    if not sizes:
        return Ghosts(False, extent, extent, 1, extent, extent, 1, extent)
    grid = Grid(sizes[::-1])
    axes = grid.axes[::-1]
    n = grid.size
    coords: dict[int, Any] = {}
    step = 1
    for a in grid.axes:
        coords[a] = (np.arange(n) // step) % grid.sizes[a]
        step *= grid.sizes[a]
    lo, hi = bounds(Dim(extent, (extent,), (axes,)), grid, coords)
    glo, ghi = bounds(Dim(extent, (loop,), (axes,), window, transposed), grid, coords)
    same = bool(((lo == glo) & (hi == ghi) | ((hi <= lo) & (ghi <= glo))).all())
    if same:
        b = int((hi - lo).max())
        return Ghosts(False, b, b, 1, b, b, 1, b)
    both = np.maximum(0, np.minimum(hi[:, None], ghi[None, :]) - np.maximum(lo[:, None], glo[None, :]))
    sent, readers, own = both.sum(1), (both > 0).sum(1), both.diagonal()
    at = int((sent - own).argmax())
    back, back_readers = both.sum(0), (both > 0).sum(0)
    there = int((back - own).argmax())
    return Ghosts(
        True,
        int((ghi - glo).max()),
        int(sent[at]),
        int(readers[at]),
        int(own[at]),
        int(back[there]),
        int(back_readers[there]),
        int(own[there]),
    )
