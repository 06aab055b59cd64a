"""Random layouts, and moves of plain global arrays through them on virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.loops import Window
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.transition import Move
from lbpar.runtime.transfers import Transfers
from lbpar.transport.virtual import VirtualWorld
from tests.util.run import cut, place

#: Extents of a tensor's dimensions; each inner tuple is the loops of a dimension that is a product.
Shape = tuple[tuple[int, ...], ...]


def random_shape(rng: np.random.Generator) -> Shape:
    """One to three dimensions of small, awkward extents, some of them products."""
    dims = []
    for _ in range(int(rng.integers(1, 4))):
        n = 1 if rng.random() < 0.7 else int(rng.integers(2, 4))
        dims.append(tuple(int(e) for e in rng.integers(1, 8 if n == 1 else 4, n)))
    return tuple(dims)


def random_layout(
    shape: Shape,
    grid: Grid,
    rng: np.random.Generator,
    *,
    ghosts: bool = False,
    partial: bool = False,
    composite: bool = True,
    at: float = 0.0,
) -> Layout:
    """Each axis cuts a random factor of a random dimension, is replicated, or (with ``partial``) partial; with a probability of ``at``
    the tensor is at one coordinate of it."""
    axes: list[list[list[int]]] = [[[] for _ in factors] for factors in shape]
    open_axes = []
    alone: list[int] = []
    for a in rng.permutation(len(grid.sizes)):
        if at and rng.random() < at:
            alone.append(int(a))
            continue
        where = rng.random()
        if where < 0.2:
            continue
        if partial and where < 0.45:
            open_axes.append(int(a))
            continue
        d = int(rng.integers(len(shape)))
        axes[d][int(rng.integers(len(shape[d]))) if composite else 0].append(int(a))
    dims = []
    for factors, each in zip(shape, axes, strict=True):
        extent = int(np.prod(factors))
        cuts: tuple[Axes, ...] = tuple(map(tuple, each))
        if not any(cuts):
            dims.append(Dim.whole(extent))
        elif len(factors) == 1 or not composite or not any(cuts[1:]) and factors[0] % grid.ways(cuts[0]) == 0:
            dims.append(Dim(extent, (extent,), (tuple(a for c in cuts for a in c),)))
        else:
            dims.append(Dim(extent, factors, cuts))
        if ghosts and len(dims[-1].factors) == 1 and any(cuts) and rng.random() < 0.6:
            dims[-1] = with_window(dims[-1], rng)
    home = Dim.only(tuple(alone), int(rng.integers(grid.ways(tuple(alone))))) if alone else None
    reduce: Literal["sum", "max"] = "max" if partial and rng.random() < 0.3 else "sum"
    return Layout(grid, tuple(dims), tuple(sorted(open_axes)), reduce, home)


def with_window(dim: Dim, rng: np.random.Generator) -> Dim:
    """The same cut of the loop on the other side of a random window."""
    k, s, d = (int(v) for v in rng.integers((1, 1, 1), (5, 3, 3)))
    pad = int(rng.integers(0, (k - 1) * d + 1))
    window = Window(k, s, d, pad)
    if rng.random() < 0.5:
        outputs = max(1, (dim.extent + 2 * pad - window.reach - 1) // s + 1)
        return replace(dim, factors=(outputs,), window=window)
    return replace(
        dim, factors=(max(1, (dim.extent - 1) * s + window.reach + 1 - 2 * pad),), window=window, transposed=True
    )


def scatter(layout: Layout, array: np.ndarray, rng: np.random.Generator | None = None) -> list[np.ndarray]:
    """Blocks of all ranks. Partial values are random shares that combine to the array."""
    shares = {}
    members = [()] if not layout.partial else list(np.ndindex(*(layout.grid.sizes[a] for a in layout.partial)))
    if rng is None or not layout.partial:
        shares = dict.fromkeys(members, array)
    elif layout.reduce == "sum":
        parts = [rng.integers(-9, 9, array.shape).astype(array.dtype) for _ in members[1:]]
        shares = dict(zip(members, [array - sum(parts), *parts], strict=True))
    else:
        winner = rng.integers(len(members), size=array.shape)
        shares = {m: np.where(winner == i, array, array - 1 - i) for i, m in enumerate(members)}
    blocks = []
    for r in range(layout.grid.size):
        coords = layout.grid.coords(r)
        blocks.append(cut(layout.box(r), shares[tuple(coords[a] for a in layout.partial)]))
    return blocks


def perform(moves: Sequence[Move], blocks: list[np.ndarray], world: VirtualWorld | None = None) -> list[np.ndarray]:
    """Carry out moves on virtual ranks: all start, then all finish."""
    for i, move in enumerate(moves):
        w = world or VirtualWorld(move.src.grid)
        engines = [Transfers(NumpyEngine(blocks[0].dtype), w.transport(r)) for r in range(move.src.grid.size)]
        pending = [t.start(move, b, False, f"move {i}") for t, b in zip(engines, blocks, strict=True)]
        blocks = [finish() for finish in pending]
        w.check_idle()
        for r, b in enumerate(blocks):
            assert b.shape == move.dst.local_shape(r), f"{move} rank {r}"
    return blocks


def where(layout: Layout, rank: int) -> tuple[np.ndarray, ...]:
    """Index of a rank's block in the global array."""
    return place(layout.box(rank))
