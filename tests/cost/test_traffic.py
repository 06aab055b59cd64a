from __future__ import annotations

import numpy as np
import pytest

from lbpar.cost.traffic import longest, traffic
from lbpar.layout.exchange import volume
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.transition import transition
from lbpar.program.lowering import lower
from tests.cost.nets import mixed
from tests.util.layouts import random_layout, random_shape
from tests.util.run import random_plan


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 2), (12,), (3, 1, 2)])
def test_every_rank_sends_what_the_layouts_say(sizes: tuple[int, ...]) -> None:
    grid, rng, graph = Grid(sizes), np.random.default_rng(3), mixed()
    seen: set[str] = set()
    for _ in range(4):
        program = lower(graph, random_plan(graph, 5, grid, rng), 5)
        for start in program.moves:
            t = traffic(start.move)
            ranks = [volume(start.move, r) for r in range(grid.size)]
            assert [t.of(r) for r in range(grid.size)] == ranks, str(start.move)
            assert t.busiest.elements == max(v.elements for v in ranks)
            assert t.total.elements == sum(v.elements for v in ranks)
            assert t.total.messages == sum(v.messages for v in ranks)
            for d in start.move.dst.dims:
                assert longest(d, grid) == max(
                    sum(b - a for a, b in d.runs(grid, grid.coords(r))) for r in range(grid.size)
                )
            seen.add(start.move.kind)
    assert {"allreduce", "halo", "allgather", "slice"} <= seen


def test_every_rank_sends_what_layouts_at_one_coordinate_say() -> None:
    rng = np.random.default_rng(0)
    seen: set[str] = set()
    for _ in range(150):
        grid, shape = Grid.of(int(rng.choice([4, 6, 12]))), random_shape(rng)
        src = random_layout(shape, grid, rng, partial=True, at=0.5)
        for move in transition(src, random_layout(shape, grid, rng, ghosts=True, at=0.5)):
            ranks = [volume(move, r) for r in range(grid.size)]
            assert [traffic(move).of(r) for r in range(grid.size)] == ranks, str(move)
            seen.add(move.kind)
    assert {"allreduce", "reduce_scatter", "allgather", "p2p", "slice", "halo"} <= seen


def test_many_ranks_cost_little() -> None:
    """65,536 ranks gather a tensor that was cut in another order; the sum over ranks is known."""
    grid = Grid.of(65536)
    axes = grid.axes
    src = Layout(grid, (Dim(1 << 20, (1 << 20,), (axes,)), Dim.whole(3)))
    dst = Layout(grid, (Dim(1 << 20, (1 << 20,), (axes[:8],)), Dim.whole(3)))
    (move,) = transition(src, dst)
    assert traffic(move).busiest.elements == 16 * 3 * 255
    assert traffic(move).total.elements == 65536 * 16 * 3 * 255
