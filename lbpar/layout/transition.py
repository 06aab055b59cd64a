"""All communication of lbpar: the moves that turn one layout of a tensor into another.

    Partial -> Replicate   allreduce             Shard -> Replicate      allgather
    Partial -> Shard       reduce_scatter        Shard(a) -> Shard(b)    alltoall
    Replicate -> Shard     slice (free)          Shard -> + ghosts       halo
    anything else between Shard and Replicate: point to point ("p2p"), needed minus held
    ghosts -> Shard, adding (the adjoint of halo)                        accumulate

What one rank sends and receives in a move is in ``exchange``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from lbpar.errors import LayoutError
from lbpar.layout.grid import Axes
from lbpar.layout.layout import Dim, Layout

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
    moves: list[Move] = []
    cur = _reduce(src, dst, moves)
    if not dst.partial and cur.reduce != dst.reduce:
        cur = replace(cur, reduce=dst.reduce)
    cur = _slice(cur, dst, moves)
    cur = _halo(cur, dst, moves)
    _reshard(cur, dst, moves)
    return tuple(moves)


def accumulate(ghosted: Layout) -> tuple[Move, ...]:
    """The adjoint of the halo exchange: add values held in ghosts into the owners' blocks."""
    if not ghosted.has_ghosts:
        return ()
    plain = ghosted.plain
    axes = tuple(sorted({a for d in ghosted.dims if d.window is not None for a in d.all_axes}))
    return (Move("accumulate", axes, ghosted, plain),)


def _reduce(cur: Layout, dst: Layout, moves: list[Move]) -> Layout:
    """Make the sums that ``dst`` wants made; what is replicated is cut on the way, so that no more travels than is needed."""
    todo = set(cur.partial) - set(dst.partial)
    if not todo:
        return cur
    free = set(cur.grid.axes) - set(cur.partial) - set(cur.shard_axes)
    dims = list(cur.dims)
    scattered: list[int] = []
    for i, (c, d) in enumerate(zip(cur.dims, dst.dims, strict=True)):
        new = tuple(a for a in d.all_axes if a in todo)
        if not new or c.window is not None:
            continue
        plain, whole = len(d.factors) == len(c.factors) == 1, not c.all_axes
        if set(d.all_axes) - set(c.all_axes) <= todo | free and (whole or plain and _extends(d.all_axes, c.all_axes)):
            dims[i] = d.plain
        elif plain:
            dims[i] = Dim(c.extent, (c.extent,), (c.all_axes + new,))
        else:
            continue
        scattered += new
    if scattered:
        nxt = replace(cur, dims=tuple(dims), partial=tuple(a for a in cur.partial if a not in scattered))
        moves.append(Move("reduce_scatter", tuple(sorted(scattered)), cur, nxt))
        cur = nxt
        todo -= set(scattered)
    if todo:
        cur = _slice(cur, dst.plain, moves)  # without ghosts: other readers may start from the sum
        nxt = replace(cur, partial=tuple(a for a in cur.partial if a not in todo))
        moves.append(Move("allreduce", tuple(sorted(todo)), cur, nxt))
        cur = nxt
    return cur


def _slice(cur: Layout, dst: Layout, moves: list[Move]) -> Layout:
    """Cut what is replicated: free, and it makes whatever follows smaller."""
    used = {*cur.shard_axes, *cur.partial}
    dims = list(cur.dims)
    for i, (c, d) in enumerate(zip(cur.dims, dst.dims, strict=True)):
        if c == d or used & (set(d.all_axes) - set(c.all_axes)):
            continue
        if not c.all_axes:  # the whole extent is here: cut it as needed, ghosts included
            dims[i] = d
        elif c.window is None and len(c.factors) == len(d.factors) == 1 and _extends(d.all_axes, c.all_axes):
            dims[i] = Dim(c.extent, (c.extent,), (d.all_axes,)) if d.window is not None else d
    if dims == list(cur.dims):
        return cur
    nxt = replace(cur, dims=tuple(dims))
    moves.append(Move("slice", (), cur, nxt))
    return nxt


def _extends(longer: Axes, shorter: Axes) -> bool:
    return len(longer) > len(shorter) and longer[: len(shorter)] == shorter


def _halo(cur: Layout, dst: Layout, moves: list[Move]) -> Layout:
    dims, axes = list(cur.dims), set()
    for i, (c, d) in enumerate(zip(cur.dims, dst.dims, strict=True)):
        if c != d and d.window is not None and c.window is None and c.axes == d.axes:
            dims[i] = d
            axes |= set(d.all_axes)
    if not axes:
        return cur
    nxt = replace(cur, dims=tuple(dims))
    moves.append(Move("halo", tuple(sorted(axes)), cur, nxt))
    return nxt


def _reshard(cur: Layout, dst: Layout, moves: list[Move]) -> None:
    changed = [(c, d) for c, d in zip(cur.dims, dst.dims, strict=True) if c != d]
    if not changed:
        return
    before: set[int] = set()
    after: set[int] = set()
    gathers = True
    for c, d in changed:
        kept = _common_prefix(c, d)
        before |= set(c.all_axes[kept:])
        after |= set(d.all_axes[kept:])
        gathers &= kept == len(d.all_axes) and d.window is None
    kind: MoveKind = "allgather" if gathers else "alltoall" if before == after else "p2p"
    moves.append(Move(kind, tuple(sorted(before)), cur, dst))


def _common_prefix(c: Dim, d: Dim) -> int:
    """Number of leading axes along which both cut alike, so that no data crosses them."""
    if c.window is not None or d.window is not None or len(c.factors) != 1 or len(d.factors) != 1:
        return 0
    n = 0
    for a, b in zip(c.axes[0], d.axes[0], strict=False):
        if a != b:
            break
        n += 1
    return n
