"""Many layouts at once are those of each op grid alone."""

from __future__ import annotations

import numpy as np

from lbpar.graph.builder import GraphBuilder
from lbpar.layout.cuts import cuts_of
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.many import Layouts
from lbpar.plan.candidates import candidates


def test_layouts_at_one_coordinate() -> None:
    grid = Grid((2, 3))
    cuts = cuts_of(grid)
    home = cuts.number(Dim.only((1,), 2))
    plain = Layouts(grid, (8, 4), (np.array([cuts.of((0,)), 0]), np.array([0, 0])), np.array([0, 1]))
    many = Layouts(grid, (8, 4), plain.dims, plain.partial, np.array([home, 0]))
    assert cuts.places.of(many.numbers) == [(cuts.of((0,)), 0, home, 0), (0, 0, 0, 1)]
    assert many != plain and many.take(np.array([1])).at.tolist() == [0] and many.classes[0].at.size == 2
    assert many.complete.at is many.plain.at is many.at


def test_layouts_of_many_op_grids_are_those_of_each() -> None:
    grid = Grid((2, 2, 2))
    cuts = cuts_of(grid)
    g = GraphBuilder(input=(8, 8, 16))
    graph = g.build(g.flatten(g.conv(g.conv(g.input, 16, 3, pad=1, name="c"), 16, 3, pad=1, groups=4, name="g")))
    for node in graph.ops:
        xs = graph.input_shapes(node.name, 8)
        loops = node.op.loops(xs)
        found = candidates(loops, grid, node.op.splits(xs), weighted=node.op.weighted)
        op_grids = {loop: np.array([cuts.of(x.get(loop, ())) for x in found]) for loop in loops}
        for k in (*node.op.forward(xs, True), *node.op.backward(xs, frozenset({"dx0", "dweight"}))):
            for o, written in [(o, False) for o in k.reads] + [(o, True) for o in k.writes]:
                many = Layouts.of(o, k, grid, op_grids, written=written)
                for i, op_grid in enumerate(found):
                    one = Layout.of(o, k, grid, op_grid, written=written)
                    *dims, partial = cuts.places.things[many.numbers[i]]
                    assert one.dims == tuple(cuts.dim(c, e) for c, e in zip(dims, many.shape, strict=True))
                    assert one.partial == cuts.axes(partial)
                assert many.has_ghosts == any(Layout.of(o, k, grid, x, written=written).has_ghosts for x in found)
                first, which = many.classes
                assert (first.numbers[which] == many.numbers).all() and np.unique(first.numbers).size == which.max() + 1
                assert many.take(np.array([1, 0])).numbers.tolist() == many.numbers[[1, 0]].tolist()
                assert many.complete.partial.max(initial=0) == 0 and not many.plain.has_ghosts
