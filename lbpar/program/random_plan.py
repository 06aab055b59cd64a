"""Random legal grids for every layer."""

from __future__ import annotations

from random import Random

from lbpar.graph.graph import Graph
from lbpar.layout.grid import Axes, Grid
from lbpar.program.plan import Plan


def random_plan(graph: Graph, batch: int, procs: int, random: Random, lean: bool = False) -> Plan:
    """A plan that gives each grid axis of each layer to a random loop of it, or leaves it idle; if ``lean``, random layers are computed again."""
    grid = Grid.of(procs)
    ops = {}
    for node in graph.ops:
        loops = [None, *node.op.loops(graph.input_shapes(node.name, batch))]
        op_grid: dict[str, Axes] = {}
        for axis in random.sample(grid.axes, len(grid.axes)):
            loop = random.choice(loops)
            if loop is not None:
                op_grid[loop] = (*op_grid.get(loop, ()), axis)
        ops[node.name] = op_grid
    again = [n.name for n in graph.ops if lean and n is not graph.loss and random.random() < 0.5]
    return Plan(grid, ops, recompute=tuple(again))
