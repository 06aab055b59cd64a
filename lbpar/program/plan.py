"""A plan: the grid, and for each op which grid axes split which of its loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lbpar.errors import PlanError
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Axes, Grid

OpGrid = Mapping[str, Axes]


@dataclass(frozen=True)
class Plan:
    """Op grids by node name; a node that is not listed runs replicated on every rank.

    Parameters
    ----------
    grid : Grid
        The processes.
    ops : mapping
        ``{node: {loop: axes}}``; axes are major first. Axes that an op does not use are idle: the replicas
        compute the same thing.
    """

    grid: Grid
    ops: Mapping[str, OpGrid] = field(default_factory=dict)

    def __getitem__(self, node: str) -> OpGrid:
        return self.ops.get(node, {})

    def ways(self, node: str) -> dict[str, int]:
        """Number of parts of each split loop of a node."""
        return {loop: self.grid.ways(axes) for loop, axes in self[node].items() if axes}

    def check(self, graph: Graph, batch: int) -> None:
        """Raise PlanError unless every op can take its grid."""
        for name, op_grid in self.ops.items():
            if name not in graph:
                raise PlanError(f"plan: {name!r} is not a layer of {graph.name}; remove it or rename it.")
            loops = graph[name].op.loops(graph.input_shapes(name, batch))
            used: set[int] = set()
            for loop, axes in op_grid.items():
                if loop not in loops:
                    raise PlanError(
                        f"{name}: a {graph[name].op.kind} has no loop {loop!r}; its loops are {', '.join(loops)}."
                    )
                for a in axes:
                    if a not in self.grid.axes:
                        raise PlanError(
                            f"{name}: grid axis {a} does not exist; the grid {self.grid} has axes 0 to {len(self.grid.sizes) - 1}."
                        )
                    if a in used:
                        raise PlanError(f"{name}: grid axis {a} is given to two loops; give each axis to one loop.")
                    used.add(a)
