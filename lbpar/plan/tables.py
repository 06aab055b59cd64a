"""Cost tables of a whole network: node vectors and edge matrices over candidate grids.

They come from lowering and pricing small programs, for all candidates at once: an op (with the element-wise ops that share its grid) alone,
with the sums of its weight gradients, and a producer and a reader, with the moves of a value and of its gradient between them. Kernels that
are fused wherever nothing moves between them are priced so, and gradients as the parts of messages in which they travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import compress
from operator import or_
from typing import cast

import numpy as np

from lbpar.graph.graph import Graph, Node
from lbpar.graph.loops import Shape
from lbpar.graph.op import Op
from lbpar.layout.cuts import Many, distinct
from lbpar.layout.many import Layouts, OpGrids
from lbpar.plan.candidates import OpGrid, candidates
from lbpar.plan.fusions import Fusion, fusions
from lbpar.plan.group import Group
from lbpar.plan.pricing import NodeTable, Pricing
from lbpar.program.lowering import Copy, backward_kernels, wanted_gradients
from lbpar.solver.search import EdgeTable

#: Idle axes are considered where computation takes at most so many times the best.
IDLE = 1.5


@dataclass
class Tables:
    """The search's input.

    ``groups``: nodes that share a grid, by the name of the first; ``nodes``: the priced candidates of each; ``edges``: pairs of groups;
    ``values``: those that several groups read, as (producer, [(reader, which of its inputs)]).
    """

    groups: dict[str, list[str]]
    nodes: dict[str, NodeTable]
    edges: dict[tuple[str, str], EdgeTable]
    values: list[tuple[str, list[tuple[str, int]]]]
    pricing: Pricing
    _starts: dict[int, float] = field(default_factory=dict)
    _transitions: dict[tuple[Shape, int, int], tuple[float, bool]] = field(default_factory=dict)

    def number(self, name: str, grid: OpGrid) -> int | None:
        """Which candidate of a group an op grid is, if any."""
        wanted = {k: tuple(v) for k, v in grid.items() if v}
        try:
            return self.nodes[name].grids.index(wanted)
        except ValueError:
            return None

    def parts(self, choice: Mapping[str, Many]) -> Many:
        """Seconds of all nodes and edges, for a choice of candidates or for arrays of choices."""
        nodes = sum(t.seconds[choice[n]] for n, t in self.nodes.items())
        return nodes + sum(e.table[e.rows[choice[a]], e.columns[choice[b]]] for (a, b), e in self.edges.items())

    def total(self, choice: Mapping[str, int]) -> float:
        """Seconds of the steps of the program that runs, for a choice of candidates."""
        return float(self.parts(choice)) + self._messages(choice) - sum(self._shared(choice, *v) for v in self.values)

    def _messages(self, choice: Mapping[str, int]) -> float:
        """Starts of the messages in which gradients travel, less the shares of them that nodes count: a message per set of axes may go
        with room left, and one may take more than its measure."""
        waiting: dict[int, float] = {}
        starts = 0.0
        for name in reversed(self.nodes):
            for sums, sizes in self.nodes[name].gradients:
                axes, full = int(sums[choice[name]]), float(sizes[choice[name]])
                if axes not in self._starts:
                    self._starts[axes] = float(self.pricing.moves.allreduce(np.array([axes])).start[0])
                start = self._starts[axes]
                starts -= start * min(1.0, full)
                if not waiting.get(axes):
                    starts += start
                waiting[axes] = 0.0 if waiting.get(axes, 0.0) + full >= 1 else waiting.get(axes, 0.0) + full
        return starts

    def _shared(self, choice: Mapping[str, int], producer: str, readers: list[tuple[str, int]]) -> float:
        """What readers of one value save because a copy in their layout, or one to slice, was made for an earlier one, or because their
        gradients are added before they move. Edges, which know one reader each, leave it out."""
        y = self.nodes[producer].y
        here, back = int(y.numbers[choice[producer]]), int(y.complete.numbers[choice[producer]])
        copies: list[tuple[int, bool]] = []
        returned, saved = set(), 0.0
        for name, i in readers:
            t, c = self.nodes[name], choice[name]
            for x in (int(layouts.numbers[c]) for layouts in t.xs[i]):
                whole, sent = self._seconds(y.shape, here, x)
                found = (self._seconds(y.shape, k, x) for k, ghosts in copies if k == x or not ghosts)
                slices = next((s for s, moved in found if not moved), None) if sent else None
                saved += 0.0 if slices is None else whole - slices
                copies.append((x, self.pricing.moves.cuts.has_ghosts(x)))
            for dx in (int(layouts.numbers[c]) for layouts in t.dxs[i]):
                saved += self._seconds(y.shape, dx, back)[0] if dx in returned else 0.0
                returned.add(dx)
        return saved

    def _seconds(self, shape: Shape, src: int, dst: int) -> tuple[float, bool]:
        """Seconds of a transition between layouts by number, and whether more than slices is in it."""
        key = (shape, src, dst)
        if key not in self._transitions:
            moves = self.pricing.moves
            (number,) = moves.between((np.array([src]), np.array([dst])))
            seconds = float(moves.seconds([(shape, self.pricing.item(), number)])[0][0])
            self._transitions[key] = (seconds, moves.communicates(int(number[0])))
        return self._transitions[key]


def group_nodes(graph: Graph, fixed: Mapping[str, OpGrid]) -> dict[str, list[str]]:
    """Nodes that share one grid: an op, and the element-wise ops that follow it with the same loops.

    Nothing could be gained by moving in between.
    """
    leader: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    loops = {n.name: n.op.loops(graph.input_shapes(n.name, 1)) for n in graph.ops}
    for node in graph.ops:
        source = node.inputs[0]
        follows = node.op.elementwise and len(node.inputs) == 1 and loops[node.name] == loops.get(source)
        follows = follows and node.name not in fixed and source not in fixed
        leader[node.name] = leader[source] if follows else node.name
        groups.setdefault(leader[node.name], []).append(node.name)
    return groups


def build_tables(graph: Graph, batch: int, pricing: Pricing, fixed: Mapping[str, OpGrid] | None = None) -> Tables:
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
    return _Builder(graph, batch, pricing, fixed or {}).build()


class _Builder:
    def __init__(self, graph: Graph, batch: int, pricing: Pricing, fixed: Mapping[str, OpGrid]) -> None:
        self.graph, self.batch, self.pricing, self.fixed = graph, batch, pricing, fixed
        self.groups = group_nodes(graph, fixed)
        self.leader = {m: name for name, members in self.groups.items() for m in members}
        self.place = {m: i for members in self.groups.values() for i, m in enumerate(members)}
        self.wanted = wanted_gradients(graph)
        self.keeps = {n.name: self._keeps(n) for n in graph.ops}
        self.fused = fusions(graph, batch, self.groups)

    def _keeps(self, node: Node) -> frozenset[str]:
        """Inputs that a node's backward pass reads."""
        kernels = backward_kernels(node.op, self.graph.input_shapes(node.name, self.batch), self.wanted[node.name])
        read = {o.value for k in kernels for o in k.reads}
        return frozenset(x for i, x in enumerate(node.inputs) if f"x{i}" in read)

    def build(self) -> Tables:
        nodes = {name: self.node(name) for name in self.groups}
        read = [
            (self.leader[x], b, i)
            for b in self.groups
            for i, x in enumerate(dict.fromkeys(self.graph[b].inputs))
            if x in self.leader
        ]
        self.price([pair for a, b, i in read for pair in _moved(nodes[a], nodes[b], i)])
        edges: dict[tuple[str, str], EdgeTable] = {}
        for a, b, i in read:
            table = self.edge(nodes[a], nodes[b], i, self.fused.get((a, b), []))
            edges[a, b] = self.added(edges[a, b], table) if (a, b) in edges else table
        for pair, uses in shares(self.graph, self.groups).items():
            a, b = sorted(pair, key=list(self.groups).index)
            for p, q in uses:
                table = shared_costs(self.pricing, nodes[pair[0]], p, nodes[pair[1]], q)
                table = table if (a, b) == pair else turned(table)
                edges[a, b] = self.added(edges[a, b], table) if (a, b) in edges else table
        values = []
        for x, name in self.leader.items():
            readers = [(self.leader[r.name], list(dict.fromkeys(r.inputs)).index(x)) for r in self.graph.consumers(x)]
            readers = [r for r in readers if r[0] != name]
            if len(readers) > 1:
                values.append((name, readers))
        return Tables(self.groups, nodes, edges, values, self.pricing)

    def node(self, name: str) -> NodeTable:
        """Candidates of a group, those that idle too much left out; equal groups share one table."""
        graph, pricing = self.graph, self.pricing
        members = [graph[m] for m in self.groups[name]]
        readers = {m: graph.consumers(m) for m in self.groups[name]}
        kept = [any(m in self.keeps[r.name] for r in readers[m]) for m in readers]
        shapes = graph.input_shapes(name, self.batch)
        returned = [
            sum(f"dx{i}" in self.wanted[r.name] for r in rs for i, x in enumerate(r.inputs) if x == m)
            for m, rs in readers.items()
        ]
        fixed = self.fixed.get(name)
        fused = self.fused.get((name,), [])
        key = (
            tuple((m.op, self.wanted[m.name]) for m in members),
            shapes,
            tuple(members[0].inputs.index(x) for x in members[0].inputs),
            (tuple(kept), tuple(returned)),
            str(fixed),
            tuple(fused),
            tuple((m.share is not None, m.name in graph.shared) for m in members),
        )
        if key not in pricing.memo:
            grids, op_grids = self.candidates(members[0].op, shapes, fixed)
            low = Group(graph, self.batch, members, op_grids, pricing).price(self.wanted)
            spared = {f"{m.name}:y" for m, k in zip(members, kept, strict=True) if k}
            seconds = low.local + low.moved
            for m, count in zip(members, returned, strict=True):
                if count > 1:
                    seconds = seconds + pricing.machine.sum_seconds(low.bytes(f"{m.name}:y"), count)
            sources = list(dict.fromkeys(members[0].inputs))
            moved = {b.partition(":")[::2]: c for b, c in low.crosses.items()}
            table = NodeTable(
                grids=grids,
                seconds=seconds,
                compute=low.local,
                summed=low.summed,
                memory=low.memory(spared) + low.weights,
                weights=low.weights,
                y=_many(low.copies[f"{name}:y"][-1:])[0],
                xs=[_many(low.copies.get(f"{x}:y", ())) for x in sources],
                dxs=[_many(low.parts.get(x, ())) for x in sources],
                gradients=low.messages,
                kernels={(self.place[n], v): seconds for (n, v), seconds in low.kernels.items()},
                crosses={(self.place[n], v): where for (n, v), where in moved.items() if n in low.inside},
                op_grids=op_grids,
                shares={
                    (self.place[m], short): (
                        cast(Layouts, low.params[f"{graph[m].owner}.{short}"]),
                        list(dict.fromkeys(dws)),
                    )
                    for (m, short), dws in low.returned.items()
                },
            )
            for f in fused:
                saved = f.within(pricing, table)
                table.seconds, table.compute = table.seconds - saved, table.compute - saved
            used = reduce(or_, (pricing.moves.cuts.mask(c) for c in op_grids.values()), np.zeros(1, int))
            idle = pricing.moves.ways[used] < pricing.inside.size
            pricing.memo[key] = table.take(np.flatnonzero(~idle | (table.compute <= IDLE * table.compute.min())))
        return pricing.memo[key]

    def candidates(self, op: Op, shapes: tuple[Shape, ...], fixed: OpGrid | None) -> tuple[Sequence[OpGrid], OpGrids]:
        """Candidate grids of an op, as they are and as numbers of cuts; many ops share them."""
        loops, memo, grid = op.loops(shapes), self.pricing.memo, self.pricing.inside
        grids: Sequence[OpGrid] = (dict(fixed or {}),)
        if fixed is None:
            spare = self.pricing.shares_cores
            grids = candidates(loops, grid, op.splits(shapes), weighted=op.weighted, spare=spare)
            if ("ways", id(grids)) not in memo:
                memo["ways", id(grids)] = ([{k: grid.ways(axes) for k, axes in g.items()} for g in grids], grids)
            trains = tuple(op.trains(shapes, w) for w in memo["ways", id(grids)][0])
            if any(trains) and not all(trains):
                grids = memo.setdefault((id(grids), trains), tuple(compress(grids, trains)))
        key = ("op grids", tuple(loops), id(grids))
        if key not in memo:
            of = self.pricing.moves.cuts.of
            memo[key] = ({loop: np.array([of(g.get(loop, ())) for g in grids]) for loop in loops}, grids)
        return grids, memo[key][0]

    def price(self, pairs: Sequence[tuple[Layouts, Layouts]]) -> None:
        """Price what moves between all groups at once."""
        pairs = list(dict.fromkeys((src.classes[0], dst.classes[0]) for src, dst in pairs))
        self.moved = dict(zip(pairs, self.pricing.tables(pairs), strict=True))

    def edge(self, u: NodeTable, v: NodeTable, i: int, fused: Sequence[Fusion]) -> EdgeTable:
        """What a value costs between its producer and a reader, there and back."""
        key = ("edge", id(u), id(v), i, tuple(fused))
        if key not in self.pricing.memo:
            tables = [self.outer(*pair) for pair in _moved(u, v, i)]
            tables[len(v.xs[i]) :] = map(turned, tables[len(v.xs[i]) :])
            tables += [f.between(self.pricing, u, v, i) for f in fused]
            if not tables:  # an input that is never read
                tables = [EdgeTable(np.zeros((1, 1)), *(np.zeros(len(t.grids), int) for t in (u, v)))]
            self.pricing.memo[key] = (joined(tables), u, v)  # kept alive: their identities are keys
        return self.pricing.memo[key][0]

    def outer(self, src: Layouts, dst: Layouts) -> EdgeTable:
        (rows, row), (columns, column) = src.classes, dst.classes
        return EdgeTable(self.moved[rows, columns], row, column)

    def added(self, a: EdgeTable, b: EdgeTable) -> EdgeTable:
        key = ("added", id(a), id(b))
        if key not in self.pricing.memo:
            self.pricing.memo[key] = (joined([a, b]), a, b)
        return self.pricing.memo[key][0]


def shares(graph: Graph, groups: Mapping[str, list[str]]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Pairs of groups of which one has parameters of the other: of the owner and of the layer that shares with it the place in its group."""
    where = {m: (name, i) for name, members in groups.items() for i, m in enumerate(members)}
    out: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for owner, users in graph.shared.items():
        a, p = where[owner]
        others = {where[n.name][0]: where[n.name][1] for n in reversed(users)}  # the first of each group
        for b, q in reversed(others.items()):
            if b != a:
                out.setdefault((a, b), []).append((p, q))
    return out


def shared_costs(
    pricing: Pricing, u: NodeTable, p: int, v: NodeTable, q: int, ends: tuple[int, int] | None = None
) -> EdgeTable:
    """Seconds of a parameter between the group that has it and another that has it too: its values there, and the gradient back.

    Gradients of one layout are added before they are summed over ranks, unless the groups are at different coordinates (``ends``, numbers of cuts).
    """
    tables = [EdgeTable(np.zeros((1, 1)), np.zeros(len(u.grids), int), np.zeros(len(v.grids), int))]
    here, there = (None, None) if ends is None else ends

    def at(layouts: Layouts, end: int | None) -> Layouts:
        return layouts if end is None else replace(layouts, at=np.full_like(layouts.partial, end))

    def table(src: Layouts, dst: Layouts) -> EdgeTable:
        (rows, row), (columns, column) = src.classes, dst.classes
        (found,) = pricing.tables([(rows, columns)], parameters=True)
        return EdgeTable(found / pricing.micro_batches, row, column)

    for (place, short), (w, dws) in v.shares.items():
        if place != q:
            continue
        home, own = u.shares[p, short]
        tables.append(table(at(home, here), at(w, there)))
        for dw in dws:
            back = turned(table(at(dw, there), at(home, here)))
            tables.append(back)
            if ends is not None:
                continue
            (first, row), (last, column) = distinct(own[0].numbers, back.rows), distinct(dw.numbers, back.columns)
            same = own[0].numbers[first][:, None] == dw.numbers[last][None, :]
            whole = back.table[np.ix_(back.rows[first], back.columns[last])]
            tables.append(EdgeTable(np.where(same, -whole, 0.0), row, column))
    return joined(tables)


def _many(copies: Sequence[Copy]) -> list[Layouts]:
    """Layouts of some copies, equal ones once."""
    return list(dict.fromkeys(cast(Layouts, c.layout) for c in copies))


def _moved(u: NodeTable, v: NodeTable, i: int) -> list[tuple[Layouts, Layouts]]:
    """How a value moves from its producer to a reader, and its gradient back."""
    return [*((u.y, x) for x in v.xs[i]), *((dx, u.y.complete) for dx in v.dxs[i])]


def turned(e: EdgeTable) -> EdgeTable:
    return EdgeTable(e.table.T, e.columns, e.rows)


def joined(tables: Sequence[EdgeTable]) -> EdgeTable:
    """The sum of tables over classes, over the coarsest classes that refine all."""
    if len(tables) == 1:
        return tables[0]
    (first, row), (last, column) = (
        distinct(*maps) for maps in zip(*((t.rows, t.columns) for t in tables), strict=True)
    )
    parts = [t.table[np.ix_(t.rows[first], t.columns[last])] for t in tables]
    return EdgeTable(reduce(np.add, parts), row, column)
