"""Random legal grids for every layer."""

from __future__ import annotations

from random import Random

from lbpar.graph.graph import Graph
from lbpar.layout.grid import Axes, Grid
from lbpar.program.plan import Plan


def random_plan(graph: Graph, batch: int, procs: int, random: Random) -> Plan:
    """A plan that gives each grid axis of each layer to a random loop of it, or leaves it idle."""
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
    return Plan(grid, ops)
