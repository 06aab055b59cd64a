"""Blocks of layouts: every element has exactly the owners that the layout says."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from lbpar.graph.loops import Index, Kernel, Operand, Window
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Dim, Layout
from tests.util.layouts import random_layout, random_shape, where


def owners(layout: Layout) -> np.ndarray:
    count = np.zeros(layout.shape, int)
    for r in range(layout.grid.size):
        count[where(layout, r)] += 1
    return count


@pytest.mark.parametrize("procs", range(1, 13))
def test_blocks_cover_every_element_once_per_replica(procs: int) -> None:
    rng = np.random.default_rng(procs)
    for _ in range(25):
        grid = Grid.of(procs)
        layout = random_layout(random_shape(rng), grid, rng)
        replicas = grid.size // grid.ways(layout.shard_axes)
        assert (owners(layout) == replicas).all(), layout
        assert sum(int(np.prod(layout.local_shape(r))) for r in range(procs)) == replicas * np.prod(layout.shape)


@pytest.mark.parametrize("procs", [4, 6, 8, 12])
def test_dropping_the_last_axes_leaves_unions_of_blocks(procs: int) -> None:
    """Cuts are nested, so a gather over the minor axes of a dimension returns a block of the coarser layout."""
    grid = Grid.of(procs)
    for extent, n in product([1, 3, 7, 13], range(1, len(grid.sizes) + 1)):
        axes = grid.axes[::-1]
        fine = Layout(grid, (Dim(extent, (extent,), (axes,)),))
        coarse = Layout(grid, (Dim(extent, (extent,), (axes[:n],)),))
        for r in range(procs):
            union = {int(i) for m in grid.group(axes[n:], r) for i in where(fine, m)[0].ravel()}
            assert union == {int(i) for i in where(coarse, r)[0].ravel()}


def test_a_composite_dimension_is_cut_along_its_loops() -> None:
    """Channels of a grouped convolution are (G, C): splitting C takes the same part of every group."""
    grid = Grid((2, 2))
    index = Index(12, ("G", "C"))
    extents = {"G": 3, "C": 4}
    by_c = Dim.of(index, extents, grid, {"C": (0,)})
    assert by_c.runs(grid, (0, 0)) == ((0, 2), (4, 6), (8, 10))
    by_both = Dim.of(index, extents, grid, {"G": (1,), "C": (0,)})
    assert by_both.runs(grid, (1, 0)) == ((2, 4), (6, 8))
    assert by_both.runs(grid, (1, 1)) == ((10, 12),)
    even = Dim.of(Index(8, ("G", "C")), {"G": 4, "C": 2}, grid, {"G": (1, 0)})
    assert even == Dim(8, (8,), ((1, 0),)), (
        "groups that divide evenly are plain channel blocks: nothing moves to a neighbour op"
    )


def conv(kernel: int, stride: int, pad: int, extent: int) -> tuple[Kernel, Operand]:
    window = Window(kernel, stride, 1, pad)
    outputs = (extent + 2 * pad - kernel) // stride + 1
    x = Operand("x0", (Index(2, ("N",)), Index(extent, ("H",), window), Index(4, ("C",))))
    return Kernel("k", (("N", 2), ("H", outputs), ("F", 3), ("C", 4)), (x,), ()), x


@pytest.mark.parametrize(
    ("kernel", "stride", "pad"), [(3, 1, 1), (7, 2, 3), (2, 2, 0), (1, 2, 0), (4, 2, 1), (5, 1, 0)]
)
@pytest.mark.parametrize("ways", [2, 3, 5])
def test_a_window_reads_needed_minus_held(kernel: int, stride: int, pad: int, ways: int) -> None:
    extent = 17
    k, x = conv(kernel, stride, pad, extent)
    grid = Grid((ways,))
    layout = Layout.of(x, k, grid, {"H": (0,)})
    outputs = k.extent("H")
    whole = Layout(grid, (Dim(outputs, (outputs,), ((0,),)),))
    for r in range(ways):
        rows = {o * stride + t - pad for o in where(whole, r)[0] for t in range(kernel)} & set(range(extent))
        held = {int(i) for i in where(layout, r)[1].ravel()}
        assert rows <= held and (not rows or held == set(range(min(rows), max(rows) + 1)))


def test_placements_of_a_convolution() -> None:
    """Shard where indexed; a written operand is partial along the loops that do not index it, a read one replicated."""
    k, x = conv(3, 1, 1, 8)
    w = Operand("w", (Index(3, ("F",)), Index(3), Index(4, ("C",))))
    grid = Grid((2, 2, 2, 2, 2))
    op_grid = {"N": (0,), "H": (1,), "F": (2,), "C": (3,)}
    assert [Layout.of(x, k, grid, op_grid).placement(a) for a in grid.axes] == ["S(0)", "S(1)", "R", "S(2)", "R"]
    read, written = Layout.of(w, k, grid, op_grid), Layout.of(w, k, grid, op_grid, written=True)
    assert [read.placement(a) for a in grid.axes] == ["R", "R", "S(0)", "S(2)", "R"]
    assert [written.placement(a) for a in grid.axes] == ["P", "P", "S(0)", "S(2)", "R"]
    assert written.complete == read
