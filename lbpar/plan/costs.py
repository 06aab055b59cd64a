"""Cost tables of a whole network: node vectors and edge matrices over candidate grids.

An edge costs the transition of a value from its producer to its reader and the transition of the matching gradient back.
Element-wise ops that follow an op whose output is complete share its grid (rule 8 of `lbpar.plan.candidates`): nothing could be gained by
moving in between. A value with several readers is counted for each of them, so totals are never too small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lbpar.graph.graph import Graph, Node
from lbpar.graph.loops import Shape
from lbpar.graph.op import Input, Op
from lbpar.graph.ops.norm import Norm
from lbpar.layout.grid import Grid
from lbpar.plan.candidates import OpGrid, candidates
from lbpar.plan.cuts import Floats, Ints
from lbpar.plan.moves import Read, move_table
from lbpar.plan.node_costs import NodeTable, Pricing, Side, node_table, thin
from lbpar.solver.search import EdgeTable

FOLLOWS = ("relu", "leaky_relu", "sigmoid", "dropout")
LEADS = ("norm", "add", "multiply", "max_pool", "avg_pool", "concat", "upsample", *FOLLOWS)

#: Idle axes are considered where computation takes at most so many times the best.
IDLE = 1.5


@dataclass
class Tables:
    """The search's input.

    ``groups``: nodes that share a grid, by the name of the first; ``nodes``: the priced candidates of each; ``edges``: pairs
    of groups; ``parts``: the same edges one by one, as (producer, reader, input): table; ``considered``: candidates before the rule about idle axes.
    """

    groups: dict[str, list[str]]
    nodes: dict[str, NodeTable]
    edges: dict[tuple[str, str], EdgeTable]
    parts: dict[tuple[str, str, int], EdgeTable] = field(default_factory=dict)
    considered: int = 0

    def number(self, name: str, grid: OpGrid) -> int | None:
        """Which candidate of a group an op grid is, if any."""
        wanted = {k: tuple(v) for k, v in grid.items() if v}
        try:
            return self.nodes[name].grids.index(wanted)
        except ValueError:
            return None


def group_nodes(graph: Graph, fixed: Mapping[str, OpGrid]) -> dict[str, list[str]]:
    """Nodes that share one grid: an op and the element-wise ops that follow it."""
    leader: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    kinds = {n.name: n.op.kind for n in graph.nodes}
    for node in graph.ops:
        source = node.inputs[0]
        follows = (
            node.op.kind in FOLLOWS
            and source in leader
            and kinds[source] in LEADS
            and node.name not in fixed
            and source not in fixed
        )
        leader[node.name] = leader[source] if follows else node.name
        groups.setdefault(leader[node.name], []).append(node.name)
    return groups


def gradients(graph: Graph) -> dict[str, frozenset[str]]:
    """Gradients that each node's backward pass makes, as lowering decides."""
    params = graph.params()
    trained: dict[str, bool] = {}
    for name, p in params.items():
        if p.kind != "statistic":
            trained[name.rpartition(".")[0]] = True
    needs: set[str] = set()
    for node in graph.ops:
        if trained.get(node.name) or needs & set(node.inputs):
            needs.add(node.name)
    out = {}
    for node in graph.ops:
        wanted = {f"dx{i}" for i, x in enumerate(node.inputs) if x in needs and i not in node.op.no_grad}
        out[node.name] = frozenset(wanted | ({"dweight"} if trained.get(node.name) else set()))
    return out


def build_tables(
    graph: Graph, batch: int, pricing: Pricing, fixed: Mapping[str, OpGrid] | None = None, training: bool = True
) -> Tables:
    """Price all candidate grids of all ops and all pairs along edges.

    Parameters
    ----------
    graph : Graph
        With its loss.
    batch : int
        Global number of samples.
    pricing : Pricing
        Machine, grid, type, optimizer.
    fixed : mapping, optional
        Grids of single nodes that are given.
    """
    fixed = fixed or {}
    groups = group_nodes(graph, fixed)
    leader = {m: name for name, members in groups.items() for m in members}
    wanted = gradients(graph)
    by_name, shapes = {n.name: n for n in graph.nodes}, graph.shapes(batch)
    readers: dict[str, list[Node]] = {}
    for node in graph.ops:
        for x in node.inputs:
            readers.setdefault(x, []).append(node)
    considered = 0
    nodes: dict[str, NodeTable] = {}
    for name, members in groups.items():
        key, parts = [], []
        for m in members:
            node = by_name[m]
            xs = tuple(shapes[x] for x in node.inputs)
            keeps = {"conv", "conv_transpose", "linear", "norm", "multiply"}
            kept = any(r.op.kind in keeps for r in readers.get(m, []))
            parts.append((node.op, xs, wanted[m], not kept))
            key.append((*parts[-1], len(readers.get(m, []))))
        forced = fixed.get(name)
        memo = ("node", tuple(key), tuple(sorted(forced.items())) if forced is not None else None)
        made = pricing.memo.get(memo)
        if made is None:
            op, xs = parts[0][0], parts[0][1]
            loops, spare = op.loops(xs), pricing.shares_cores
            grids = (dict(forced),) if forced is not None else candidates(op.kind, loops, pricing.grid, spare)
            grids = _trainable(op, xs, grids, pricing.grid)
            made = pricing.memo[memo] = (len(grids), _group_table(parts, grids, pricing))
        considered += made[0]
        nodes[name] = made[1]
    out = Tables(groups, nodes, {}, {}, considered)
    for node in graph.ops:
        for i, x in enumerate(node.inputs):
            a, b = leader.get(x), leader[node.name]
            if a is None or a == b or isinstance(by_name[x].op, Input):
                continue
            out.parts[a, b, i] = _edge(nodes[a], nodes[b], i, f"dx{i}" in wanted[node.name], pricing)
    for (a, b, _), table in out.parts.items():
        known = out.edges.get((a, b))
        out.edges[a, b] = table if known is None else _added(known, table, pricing)
    return out


def _trainable(op: Op, xs: Sequence[Shape], grids: tuple[OpGrid, ...], grid: Grid) -> tuple[OpGrid, ...]:
    """Those that leave no part of a norm with a single value per channel, unless none does."""
    if not isinstance(op, Norm) or op.stats == "global":
        return grids
    ways = ({loop: grid.ways(axes) for loop, axes in g.items()} for g in grids)
    return tuple(g for g, w in zip(grids, ways, strict=True) if op.fewest(xs, w) > 1) or grids


def _group_table(parts: list, grids: Sequence[OpGrid], pricing: Pricing) -> NodeTable:
    op, xs, wanted, keep_y = parts[0]
    table = node_table(op, xs, wanted, keep_y, grids, pricing)
    for op, xs, wanted, keep_y in parts[1:]:
        more = node_table(op, xs, wanted, keep_y, grids, pricing)
        table.seconds = table.seconds + more.seconds
        table.compute = table.compute + more.compute
        table.summed = table.summed + more.summed
        table.memory = table.memory + more.memory
    idle = _ways_used(grids, pricing) < pricing.grid.size
    keep = np.flatnonzero(~idle | (table.compute <= IDLE * table.compute.min()))
    return thin(table, keep)


def _ways_used(grids: Sequence[OpGrid], pricing: Pricing) -> Ints:
    key = ("used", id(grids))
    known = pricing.memo.get(key)
    if known is None:
        ways = np.array([pricing.grid.ways(tuple(a for axes in g.values() for a in axes)) for g in grids])
        known = pricing.memo[key] = (ways, grids)
    return known[0]


def _classes(side: Side, partial: bool) -> tuple[Ints, Ints]:
    """Distinct layouts of a side (one candidate of each), and the class of every candidate."""
    key = side.cuts[:, 0] * 0
    for i in range(side.cuts.shape[1]):
        key = key * (int(side.cuts[:, i].max()) + 1) + side.cuts[:, i]
    if partial:
        key = key * (int(side.partial.max()) + 1) + side.partial
    _, first, index = np.unique(key, return_index=True, return_inverse=True)
    return first, index.reshape(-1)


def _edge(u: NodeTable, v: NodeTable, i: int, backward: bool, pricing: Pricing) -> EdgeTable:
    key = ("edge", id(u), id(v), i, backward)
    known = pricing.memo.get(key)
    if known is not None:
        return known[0]
    y, x = u.y, v.xs[i]
    rows, row = _classes(y, True)
    columns, column = _classes(x, False)
    forward = _moves(pricing, y.shape, y.cuts[rows], y.partial[rows], x.cuts[columns], x.reads)
    if backward:
        dx = v.dxs[i]
        sources, source = _classes(dx, True)
        homes, home = _classes(y, False)
        plain = tuple(Read() for _ in y.shape)
        back = _moves(pricing, y.shape, dx.cuts[sources], dx.partial[sources], y.cuts[homes], plain)
        forward, row, column = _joined(forward, row, column, back.T, home, source)
    made = EdgeTable(forward, row, column)
    pricing.memo[key] = (made, u, v)  # the tables are kept alive: their identities are keys
    return made


def _joined(a: Floats, ra: Ints, ca: Ints, b: Floats, rb: Ints, cb: Ints) -> tuple[Floats, Ints, Ints]:
    """The sum of two tables over classes, over the coarsest classes that refine both."""
    row_first, row = _refine(ra, rb)
    column_first, column = _refine(ca, cb)
    table = a[np.ix_(ra[row_first], ca[column_first])] + b[np.ix_(rb[row_first], cb[column_first])]
    return table, row, column


def _refine(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    _, first, index = np.unique(a * (int(b.max()) + 1) + b, return_index=True, return_inverse=True)
    return first, index.reshape(-1)


def _moves(pricing: Pricing, shape: tuple[int, ...], src: Ints, partial: Ints, dst: Ints, reads: tuple) -> Floats:
    key = ("moves", shape, src.tobytes(), partial.tobytes(), dst.tobytes(), reads)
    known = pricing.memo.get(key)
    if known is None:
        known = move_table(pricing.links, pricing.cuts, shape, src, partial, dst, reads, pricing.item)
        pricing.memo[key] = known
    return known


def _added(a: EdgeTable, b: EdgeTable, pricing: Pricing) -> EdgeTable:
    key = ("added", id(a), id(b))
    known = pricing.memo.get(key)
    if known is None:
        known = pricing.memo[key] = (EdgeTable(*_joined(a.table, a.rows, a.columns, b.table, b.rows, b.columns)), a, b)
    return known[0]
