"""All communication of lbpar: the moves that turn one layout of a tensor into another.

    Partial -> Replicate   allreduce             Shard -> Replicate      allgather
    Partial -> Shard       reduce_scatter        Shard(a) -> Shard(b)    alltoall
    Replicate -> Shard     slice (free)          Shard -> + ghosts       halo
    At(j) -> At(k)         p2p                   At(j) -> Replicate      allgather
    anything else between Shard, At and Replicate: point to point ("p2p"), needed minus held
    ghosts -> Shard, adding (the adjoint of halo)                        accumulate

`stages` decides, for one pair of layouts or for arrays of them at once: cuts of a dimension are numbers (`lbpar.layout.cuts`), sets of
axes are bits. What one rank sends and receives in a move is in ``exchange``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from operator import or_
from typing import Literal

import numpy as np

from lbpar.errors import LayoutError
from lbpar.layout.cuts import Cuts, Ints, Many, bits, cuts_of, pick
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Layout

MoveKind = Literal["allreduce", "reduce_scatter", "allgather", "alltoall", "halo", "p2p", "slice", "accumulate"]


@dataclass(frozen=True)
class Move:
    """One collective (or local slice) over the sub-communicator of ``axes``, from layout ``src`` to ``dst``."""

    kind: MoveKind
    axes: Axes
    src: Layout
    dst: Layout

    def __str__(self) -> str:
        return f"{self.kind}({','.join(map(str, self.axes))}) {self.src} -> {self.dst}"


@dataclass(frozen=True, eq=False)
class Stage:
    """One kind of move between layouts of a tensor.

    Parameters
    ----------
    kind : str
        Kind of move.
    axes : int or int array
        Axes over which it goes, as bits.
    src, dst : tuple of int or of int arrays
        Cut of every dimension before and after.
    at : int array, optional
        Of arrays of layouts, those pairs (flat numbers) that move; the other arrays have one entry for each of them.
    """

    kind: MoveKind
    axes: Many
    src: tuple[Many, ...]
    dst: tuple[Many, ...]
    at: Ints | None = None


def stages(
    cuts: Cuts, src: Sequence[Many], dst: Sequence[Many], partial: Many, kept: Many = 0, *, shape: tuple[int, ...] = ()
) -> list[Stage]:
    """What turns layouts into others, in order.

    Parameters
    ----------
    cuts : Cuts
        What numbers of cuts mean.
    src, dst : sequences of int, or of int arrays that broadcast against each other
        Cut of every dimension (of `Layout.cuts`, where a tensor may be at one coordinate), before and after.
    partial, kept : int or int array
        Axes along which values are partial, before and after, as bits.
    shape : tuple of int
        The shape to which arrays broadcast; empty for one pair.
    """
    out: list[Stage] = []

    def note(kind: MoveKind, active: Many, axes: Many, before: Sequence[Many], after: Sequence[Many]) -> None:
        if not np.any(active):
            return
        if not shape:
            out.append(Stage(kind, axes, tuple(before), tuple(after)))
            return
        at = np.flatnonzero(np.broadcast_to(active, shape))

        def here(x: Many) -> Many:
            return np.broadcast_to(x, shape).reshape(-1)[at]

        out.append(Stage(kind, here(axes), tuple(map(here, before)), tuple(map(here, after)), at))

    cur = list(src)
    todo = partial & ~kept
    if np.any(todo):
        # What is replicated is cut on the way, so that no more travels than is needed.
        free = cuts.everything & ~(partial | _union(cuts.mask(c) for c in cur))
        nxt = [cuts.scattered(c, d, todo, free) for c, d in zip(cur, dst, strict=True)]
        gone = _union(pick(n != c, todo & cuts.mask(d), 0) for c, n, d in zip(cur, nxt, dst, strict=True))
        note("reduce_scatter", gone != 0, gone, cur, nxt)
        cur, left = nxt, todo & ~gone
        if np.any(left):  # without ghosts: other readers may start from the sum
            goal = [cuts.plain(d) for d in dst]
            nxt, cut = _sliced(cuts, cur, goal, partial & ~gone, left != 0)
            note("slice", cut, 0, cur, nxt)
            note("allreduce", left != 0, left, nxt, nxt)
            cur = nxt
    # Cutting what is replicated is free, and makes whatever follows smaller.
    nxt, cut = _sliced(cuts, cur, dst, kept, True)
    note("slice", cut, 0, cur, nxt)
    cur = nxt
    if cuts.has_at:
        cur = _go(cuts, cur, dst, note)
    edge = [cuts.pair(c, d).halo for c, d in zip(cur, dst, strict=True)]
    axes = _union(pick(e, cuts.mask(d), 0) for e, d in zip(edge, dst, strict=True))
    nxt = [pick(e, d, c) for e, c, d in zip(edge, cur, dst, strict=True)]
    note("halo", axes != 0, axes, cur, nxt)
    cur = nxt
    pairs = [cuts.pair(c, d) for c, d in zip(cur, dst, strict=True)]
    before, after = _union(p.before for p in pairs), _union(p.after for p in pairs)
    changed = reduce(or_, (c != d for c, d in zip(cur, dst, strict=True)), False)
    scatters = reduce(or_, (p.scatters for p in pairs), False)
    at = reduce(or_, (p.at for p in pairs), False)
    swaps = scatters & (before == after) & (at ^ True)
    note("allgather", changed & (scatters ^ True), before, cur, dst)
    note("alltoall", changed & swaps, before, cur, dst)
    note("p2p", changed & scatters & (swaps ^ True), before, cur, dst)
    return out


def _union(masks: Iterable[Many]) -> Many:
    return reduce(or_, masks, 0)


def _sliced(
    cuts: Cuts, cur: Sequence[Many], dst: Sequence[Many], partial: Many, where: Many
) -> tuple[list[Many], Many]:
    """Cut what is replicated towards ``dst``, and whether anything is cut."""
    used = partial | _union(cuts.mask(c) for c in cur)
    nxt, changed = [], False
    for c, d in zip(cur, dst, strict=True):
        free = (used & cuts.mask(d) & ~cuts.mask(c)) == 0
        nxt.append(pick(where & free, cuts.pair(c, d).sliced, c))
        changed = changed | (nxt[-1] != c)
    return nxt, changed


def _go(cuts: Cuts, cur: Sequence[Many], dst: Sequence[Many], note: Callable[..., None]) -> list[Many]:
    """Go from one coordinate to another, or to all, before anything else changes: every rank's block goes to its counterparts, and
    what follows goes on where it is wanted."""
    nxt = list(cur)
    for i, (c, d) in enumerate(zip(cur, dst, strict=True)):
        come, leave = cuts.mask(d), cuts.mask(c)
        others = _union(cuts.mask(x) for x in (*nxt[:i], *nxt[i + 1 :]))
        wanted = _union(cuts.mask(x) for x in (*dst[:i], *dst[i + 1 :]))
        free = cuts.pair(c, d).at & (leave != 0) & (come & others == 0) & ((come != 0) | (leave & wanted == 0))
        before, nxt[i] = list(nxt), pick(free, d, c)
        note("p2p", free & (come != 0), leave, before, nxt)
        note("allgather", free & (come == 0), leave, before, nxt)
    return nxt


@lru_cache(maxsize=1 << 16)
def _stages(grid: Grid, src: tuple[int, ...], dst: tuple[int, ...], partial: int, kept: int) -> list[Stage]:
    """`stages` of one pair; numbers of cuts say nothing of extents, so tensors of many shapes share them."""
    return stages(cuts_of(grid), src, dst, partial, kept)


@lru_cache(maxsize=1 << 16)
def transition(src: Layout, dst: Layout) -> tuple[Move, ...]:
    """Moves from ``src`` to ``dst``, in order; empty if nothing changes.

    Parameters
    ----------
    src : Layout
        Where the values are; its blocks must not overlap (no ghosts), except in dimensions that ``dst`` cuts alike.
    dst : Layout
        Where they are needed. Its partial axes must be partial in ``src`` too: sums are made, never undone.

    Raises
    ------
    LayoutError
        The shapes or grids differ, or ``dst`` is partial where ``src`` is not.
    """
    if src.shape != dst.shape or src.grid != dst.grid:
        raise LayoutError(f"transition: cannot go from {src} to {dst}: global shapes and grids must be equal.")
    if not set(dst.partial) <= set(src.partial):
        raise LayoutError(f"transition: {dst} is partial along axes where {src} is complete; sums cannot be undone.")
    cuts, moves, cur = cuts_of(src.grid), [], src
    one = src.at is not None or dst.at is not None
    before, after = (tuple(cuts.number(d) for d in (x.cuts if one else x.dims)) for x in (src, dst))
    for s in _stages(src.grid, before, after, bits(src.partial), bits(dst.partial)):
        axes = cuts.axes(s.axes)
        summed = s.kind in ("reduce_scatter", "allreduce")
        if not summed and not dst.partial and set(cur.partial) <= set(dst.partial):
            cur = replace(cur, reduce=dst.reduce)
        dims = tuple(cuts.dim(c, e) for c, e in zip(s.dst, src.shape, strict=False))
        at = cuts.dim(s.dst[-1], 1) if one and s.dst[-1] else None
        nxt = replace(cur, dims=dims, at=at, partial=tuple(a for a in cur.partial if not (summed and a in axes)))
        moves.append(Move(s.kind, axes, cur, nxt))
        cur = nxt
    return tuple(moves)


def accumulate(ghosted: Layout) -> tuple[Move, ...]:
    """The adjoint of the halo exchange: add values held in ghosts into the owners' blocks."""
    if not ghosted.has_ghosts:
        return ()
    plain = ghosted.plain
    axes = tuple(sorted({a for d in ghosted.dims if d.window is not None for a in d.all_axes}))
    return (Move("accumulate", axes, ghosted, plain),)
