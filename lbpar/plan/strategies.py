"""Named strategies: one rule for all layers.

Layers with weights take the strategy's grid; every other op *follows* the op it reads, so that nothing moves in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lbpar.graph.graph import Graph, Node
from lbpar.graph.loops import Operand
from lbpar.layout.grid import Axes, Grid
from lbpar.program.lowering import forward_kernels
from lbpar.program.plan import OpGrid, Plan

Rule = Callable[["Walk", Node], OpGrid]


class Walk:
    """One pass over a graph in which each node gets its grid.

    Parameters
    ----------
    graph : Graph
    grid : Grid
    batch : int
        Global number of samples.
    """

    def __init__(self, graph: Graph, grid: Grid, batch: int) -> None:
        self.graph, self.grid, self.batch = graph, grid, batch
        self.ops: dict[str, OpGrid] = {}

    def extents(self, node: Node) -> dict[str, int]:
        """Loops of a node and their extents."""
        return node.op.loops(self.graph.input_shapes(node.name, self.batch))

    def operand(self, name: str, value: str) -> Operand | None:
        """How a node's forward pass indexes one of its values."""
        node = self.graph[name]
        for k in forward_kernels(node.op, self.graph.input_shapes(name, self.batch), True):
            for o in (*k.reads, *k.writes):
                if o.value == value:
                    return o
        return None

    def follow(self, node: Node) -> OpGrid:
        """The grid that takes the first input that a layer makes as that layer leaves it; summed channels are scattered."""
        i = next((i for i, name in enumerate(node.inputs) if name in self.ops), None)
        if i is None:
            return self.samples()
        producer = self.graph[node.inputs[i]]
        y, x = self.operand(producer.name, "y"), self.operand(node.name, f"x{i}")
        if y is None or x is None:
            return {}
        theirs = self.ops[producer.name]
        loops = self.extents(node)
        out: dict[str, Axes] = {}
        for a, b in zip(y.dims, x.dims, strict=True):
            axes = tuple(i for loop in a.loops for i in theirs.get(loop, ()))
            if axes and b.loops and b.loops[-1] in loops:
                out[b.loops[-1]] = axes
        if producer.op.weighted and theirs.get("C"):
            last = x.dims[-1].loops[-1]
            out[last] = (*out.get(last, ()), *theirs["C"])
        return out

    def samples(self) -> OpGrid:
        """All processes split the samples."""
        return {"N": self.grid.axes[::-1]}

    def run(self, rule: Rule, given: Mapping[str, OpGrid]) -> Plan:
        """Grids for all nodes: as given, by the rule for layers with weights and those that read the data, by following for the rest."""
        for node in self.graph.ops:
            if node.name in given:
                self.ops[node.name] = given[node.name]
            elif node.op.weighted or (rule in (spatial, slabs) and not any(name in self.ops for name in node.inputs)):
                self.ops[node.name] = rule(self, node)
            else:
                self.ops[node.name] = self.follow(node)
        return Plan(self.grid, {k: {x: a for x, a in v.items() if a} for k, v in self.ops.items()})


def data(walk: Walk, node: Node) -> OpGrid:
    """Samples split over all processes (batch parallelism)."""
    return walk.samples()


def spatial(walk: Walk, node: Node) -> OpGrid:
    """Each axis cuts the spatial dimension that is largest at that point; what no space is left for cuts samples.

    Linear layers split samples where there are enough of them, filters otherwise.
    """
    return _in_space(walk, node, 3)


def slabs(walk: Walk, node: Node) -> OpGrid:
    """As `spatial`, but only the first spatial dimension is cut: depth of volumes, height of pictures."""
    return _in_space(walk, node, 1)


def _in_space(walk: Walk, node: Node, dimensions: int) -> OpGrid:
    uneven = (k for k, even in node.op.splits(walk.graph.input_shapes(node.name, walk.batch)).items() if not even)
    left = {k: walk.extents(node)[k] for k in sorted({"D", "H", "W"}.intersection(uneven))[:dimensions]}
    if not left:
        return (
            walk.samples() if node.op.kind != "linear" or walk.batch >= walk.grid.size else {"F": walk.grid.axes[::-1]}
        )
    out: dict[str, Axes] = {}
    for a in walk.grid.axes[::-1]:
        size = walk.grid.sizes[a]
        loop = max(left, key=lambda k: left[k])
        if left[loop] < 2 * size:
            loop = "N"
        else:
            left[loop] //= size
        out[loop] = (*out.get(loop, ()), a)
    return out


def filters(walk: Walk, node: Node) -> OpGrid:
    """Filters (of a grouped convolution: groups) over all processes: stationary-Y."""
    extents = walk.extents(node)
    loop = "G" if extents.get("G", 1) >= walk.grid.size else "F"
    return {loop: walk.grid.axes[::-1]}


def channels(walk: Walk, node: Node) -> OpGrid:
    """Input channels over all processes: stationary-X; samples where there are too few channels."""
    extents = walk.extents(node)
    for loop in ("G", "C"):
        if extents.get(loop, 1) >= walk.grid.size:
            return {loop: walk.grid.axes[::-1]}
    return walk.samples()


def stationary_w(walk: Walk, node: Node) -> OpGrid:
    """Input channels over half of the axes and filters over the other half.

    The halves change roles from layer to layer: the scattered output of one layer then is, as it lies, the gathered input of the next.
    """
    producer = node.inputs[0]
    held: Axes = ()
    if producer in walk.ops:
        y = walk.operand(producer, "y")
        if y is not None:
            held = tuple(a for loop in y.dims[-1].loops for a in walk.ops[producer].get(loop, ()))
    order = held if set(held) == set(walk.grid.axes) else walk.grid.axes[::-1]
    half = len(order) // 2
    extents = walk.extents(node)
    c, f = order[:half], order[half:]
    if extents.get("C", 1) < walk.grid.ways(c):
        c, f = (), order
    return {"C": c, "F": f}


def one_weird_trick(walk: Walk, node: Node) -> OpGrid:
    """Convolutions split samples, linear layers split filters (Krizhevsky's "one weird trick")."""
    return {"F": walk.grid.axes[::-1]} if node.op.kind == "linear" else walk.samples()


STRATEGIES: dict[str, Rule] = {
    "data": data,
    "spatial": spatial,
    "slabs": slabs,
    "filter": filters,
    "channel": channels,
    "stationary-w": stationary_w,
    "owt": one_weird_trick,
}


def strategy_plan(name: str, graph: Graph, grid: Grid, batch: int, given: Mapping[str, OpGrid] | None = None) -> Plan:
    """The plan of a named strategy.

    Parameters
    ----------
    name : str
        A key of `STRATEGIES`.
    graph : Graph
    grid : Grid
    batch : int
        Global number of samples.
    given : mapping, optional
        Grids of single nodes that override the rule.
    """
    return Walk(graph, grid, batch).run(STRATEGIES[name], given or {})
