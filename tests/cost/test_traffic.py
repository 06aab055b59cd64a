from __future__ import annotations

import numpy as np
import pytest

from lbpar.cost.traffic import largest_exchanges, longest, traffic
from lbpar.graph.loops import Window
from lbpar.layout.exchange import volume
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.runs import intersect, length
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


def test_exchanges_counted_at_once_are_those_of_the_rank_that_sends_most() -> None:
    """Against every rank and member; cuts with more parts than indices, and windows, included."""
    rng, asked = np.random.default_rng(0), []
    for _ in range(150):
        grid = Grid(tuple(rng.choice([2, 3, 4], rng.integers(1, 4)).tolist()))
        extent = int(rng.integers(1, 30))

        axes = [
            tuple(rng.permutation(len(grid.sizes))[: rng.integers(0, len(grid.sizes) + 1)].tolist()) for _ in range(3)
        ]
        window = Window(3, pad=1) if axes[1] and rng.random() < 0.4 else None
        s, d = (Dim(extent, (extent,), (cut,), w) for cut, w in ((axes[0], None), (axes[1], window)))
        asked.append((s, d, tuple(sorted(axes[2])), grid))
    for (s, d, axes, grid), found in zip(asked, largest_exchanges(asked), strict=True):
        ranks = []
        for rank in range(grid.size):
            mine = s.runs(grid, grid.coords(rank))
            members = [grid.coords(r) for r in grid.group(axes, rank)]
            wanted = {tuple(c[a] for a in d.all_axes): length(intersect(mine, d.runs(grid, c))) for c in members}
            kept = length(intersect(mine, d.runs(grid, grid.coords(rank))))
            sent = sum(wanted.values())
            ranks.append((sent - kept, sent, sum(n > 0 for n in wanted.values()), kept))
        assert found == max(ranks)[1:]
