"""Cost tables of a whole network: node vectors and edge matrices over candidate grids.

They come from lowering and pricing small programs, for all candidates at once: an op (with the element-wise ops that share its grid) alone,
with the sums of its weight gradients, and a producer and a reader, with the moves of a value and of its gradient between them. Kernels that
are fused wherever nothing moves between them are priced so, and gradients as the parts of messages in which they travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from operator import or_
from typing import Any, cast

import numpy as np

from lbpar.cost.kernel_time import busy, item_bytes, kernel_seconds
from lbpar.cost.machine import Machine
from lbpar.cost.moves import Floats, MovePrices, move_prices
from lbpar.cost.price import SLOTS
from lbpar.graph.graph import Graph, Node
from lbpar.graph.loops import Kernel
from lbpar.layout.cuts import Ints, distinct, pick
from lbpar.layout.grid import Grid
from lbpar.layout.many import Layouts, OpGrids, Place
from lbpar.layout.transition import Stage, stages
from lbpar.plan.candidates import OpGrid, candidates
from lbpar.plan.fusions import Fusion, fusions
from lbpar.program.fuse import COPY
from lbpar.program.lowering import Copy, Lowering, wanted_gradients
from lbpar.program.order import BUCKET_BYTES
from lbpar.program.plan import Plan
from lbpar.program.steps import Compute
from lbpar.solver.search import EdgeTable

#: Idle axes are considered where computation takes at most so many times the best.
IDLE = 1.5


@dataclass
class Pricing:
    """What the planner prices with, and its memory of what it has priced."""

    machine: Machine
    grid: Grid
    dtype: str = "float32"
    optimizer: str = "momentum"
    moves: MovePrices = field(init=False)
    memo: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.moves = move_prices(self.machine, self.grid)

    @property
    def shares_cores(self) -> bool:
        """Whether there are more processes than cores."""
        return bool(self.machine.turns(self.grid.size, self.grid.size) > 1)

    def item(self, dtype: str | None = None) -> int:
        """Bytes per element."""
        return item_bytes(dtype, self.dtype)

    def kernel(self, kernel: Kernel, op_grids: OpGrids) -> Floats:
        """Seconds of a kernel on the largest block that each op grid gives."""
        cuts, machine, procs = self.moves.cuts, self.machine, self.grid.size
        local = {loop: self.moves.lengths(e)[op_grids[loop]] if loop in op_grids else e for loop, e in kernel.loops}
        seconds = kernel_seconds(machine, kernel, local, self.dtype)
        if machine.file.cores is not None:
            ways = {loop: self.moves.ways[cuts.mask(c)] for loop, c in op_grids.items()}
            seconds = seconds * machine.turns(busy(kernel, ways, procs), procs)
        return seconds

    def stages(self, src: Layouts, dst: Layouts, *, outer: bool = False) -> list[Stage]:
        """Stages from each layout to the one at the same place, or to every one (``outer``: places row by row)."""
        key = (outer, src.key[1:], dst.key[1:])
        known = self.memo.get(key)
        if known is None:
            a, b = (slice(None), None) if outer else slice(None), (None, slice(None)) if outer else slice(None)
            size = (src.partial.size, dst.partial.size) if outer else (src.partial.size,)
            ends = [d[a] for d in src.dims], [d[b] for d in dst.dims]
            known = stages(self.moves.cuts, *ends, src.partial[a], dst.partial[b], shape=size)
            self.memo[key] = known
        return known

    def table(self, src: Layouts, dst: Layouts) -> Floats:
        """Seconds from each of some layouts to each of others."""
        key = ("table", src.key, dst.key)
        known = self.memo.get(key)
        if known is None:
            known = np.zeros(src.partial.size * dst.partial.size)
            for s in self.stages(src, dst, outer=True):
                known[s.at] += self.moves.stage(s, src.shape, self.item())
            known = self.memo[key] = known.reshape(src.partial.size, dst.partial.size)
        return known

    def bucketed(self, layouts: Layouts, axes: Ints, full: Floats, item: int) -> Floats:
        """Seconds of an allreduce that fills a part of a message: its bytes, and its share of the start."""
        size = self.moves.size(layouts.shape, layouts.dims)
        p, (term, _) = self.moves.ways[axes], self.moves.terms("allreduce", axes)
        packing = np.where(full < 1, self.machine.copy_seconds(2 * size * item), 0)
        return pick(axes > 0, term.start * full + term.byte * 2 * size * item * (p - 1) / p + packing, 0.0)


@dataclass(frozen=True)
class _Moves:
    """A transition of many layouts, as lowering sees it: one move."""

    kind: str
    src: Layouts
    dst: Layouts
    stages: list[Stage]


class _Alone(Lowering):
    """Lowers one group for all its candidates and prices what it does instead of noting it."""

    def __init__(self, graph: Graph, batch: int, nodes: Sequence[Node], op_grids: OpGrids, pricing: Pricing) -> None:
        plan = Plan(pricing.grid, {n.name: op_grids for n in nodes})  # type: ignore[misc]
        super().__init__(graph, plan, batch, nodes=nodes)
        self.nodes, self.op_grids, self.pricing = nodes, op_grids, pricing
        self.inside = {n.name for n in nodes}
        zero = np.zeros(next(iter(op_grids.values())).size if op_grids else 1)
        self.local, self.moved, self.summed = zero, zero, zero
        self.kernels: dict[tuple[str, str], Floats] = {}
        self.crosses: dict[str, Ints] = {}  # value -> whether it moves
        self.messages: list[tuple[Ints, Floats]] = []
        self.kept: set[str] = set()  # buffers that wait for the backward pass
        self.parts: dict[str, list[Copy]] = {}

    def is_fed(self, value: str) -> bool:
        return ":" not in value and value not in self.inside and value in self.graph

    def layout(self, kernel, operand, op_grid, *, written=False):  # type: ignore[no-untyped-def, override]
        return Layouts.of(operand, kernel, self.grid, op_grid, written=written)

    def moves(self, src, dst):  # type: ignore[no-untyped-def, override]
        found = self.pricing.stages(src, dst)
        return (_Moves("allreduce" if src.partial.any() else "p2p", src, dst, found),) if found else ()

    def accumulated(self, ghosted):  # type: ignore[no-untyped-def, override]
        if not ghosted.has_ghosts:
            return ()
        cuts, plain = self.pricing.moves.cuts, ghosted.plain
        axes = reduce(or_, (pick(cuts.ghosts(d), cuts.mask(d), 0) for d in ghosted.dims))
        at = np.flatnonzero(axes)
        src, dst = (tuple(d[at] for d in x.dims) for x in (ghosted, plain))
        return (_Moves("accumulate", ghosted, plain, [Stage("accumulate", axes[at], src, dst, at)]),)

    def move(self, move, src, node):  # type: ignore[no-untyped-def, override]
        dtype = self.buffers[src].dtype
        seconds = np.zeros_like(self.local)
        for s in move.stages:
            seconds[s.at] += self.pricing.moves.stage(s, move.src.shape, self.pricing.item(dtype))
            self.crosses[src] = self.crosses.get(src, np.zeros(seconds.shape, bool))
            self.crosses[src][s.at] = True
        if ":grad" in src or (self.phase == "update" and move.kind == "allreduce"):
            axes = move.src.partial & ~move.dst.partial
            shards = reduce(or_, (self.pricing.moves.cuts.mask(d) for d in move.src.dims))
            full = 4 * prod(move.src.shape) / self.pricing.moves.ways[shards] / BUCKET_BYTES
            seconds = self.pricing.bucketed(move.src, axes, np.minimum(full, 1), self.pricing.item(dtype))
            if ":grad" in src:
                self.messages.append((axes, full))
                self.summed = self.summed + seconds
        self.moved = self.moved + seconds
        return self.buffer(src.split("@")[0], move.dst, dtype)

    def compute(self, step: Compute) -> None:
        if step.kernel.name == COPY:
            return
        seconds = self.pricing.kernel(step.kernel, self.op_grids)
        self.kernels[step.node, step.kernel.writes[0].value] = seconds
        self.local = self.local + seconds
        if step.phase == "backward":
            self.kept |= {b for b in step.reads if b in self.waiting}

    def price(self, wanted: Mapping[str, frozenset[str]]) -> _Alone:
        """Forward, backward from a complete gradient of the output, update, optimizer."""
        for node in self.nodes:
            self.node_forward(node)
        self.waiting = set(self.buffers) - set(self.params)
        self.phase = "backward"
        for node in reversed(self.nodes):
            if wanted[node.name]:
                if node is not self.graph.loss:
                    self.hold(f"{node.name}:dy", self.grad_layout(node))
                self.node_backward(node, wanted[node.name], self.parts)
        self.phase = "update"
        for node in self.nodes:
            for k in node.op.update(self.xs[node.name]):
                self.kernel(node, k)
        turns = self.pricing.machine.turns(self.grid.size, self.grid.size)
        for name in self.grads:
            size, slots = self.bytes(name), SLOTS[self.pricing.optimizer]
            self.local = self.local + self.pricing.machine.update_seconds(size, slots) * turns
        return self

    def bytes(self, buffer: str) -> Floats:
        """Bytes of a buffer on the rank with the largest block."""
        b = self.buffers[buffer]
        return self.pricing.moves.size(b.layout.shape, b.layout.dims) * self.pricing.item(b.dtype)

    def memory(self, spared: set[str]) -> Floats:
        """Bytes that stay until the backward pass, but for ``spared`` buffers; parameters and their companions included."""
        held = sum((self.bytes(b) for b in self.kept - spared), np.zeros_like(self.local))
        for name in self.params:
            held = held + self.bytes(name) * (2 + SLOTS[self.pricing.optimizer] if name in self.grads else 1)
        return held


@dataclass(eq=False)
class NodeTable:
    """All candidates of one op (with what follows it).

    ``seconds``: node cost; ``compute``: its local part; ``summed``: the sums of weight gradients, which computation can hide;
    ``memory``: bytes that stay until the backward pass, parameters and their companions included; ``y``: layouts of the output;
    ``xs``, ``dxs``: of each input (in order, equal ones once) those in which it is read, and those of its gradient;
    ``gradients``: of each parameter's gradient the axes (as bits) over which it is summed, and how much of a message it fills;
    ``kernels``: seconds of every kernel, by member and what it writes; ``crosses``: which values of an op move inside it;
    ``op_grids``: the candidates as numbers of cuts.
    """

    grids: Sequence[OpGrid]
    seconds: Floats
    compute: Floats
    summed: Floats
    memory: Floats
    y: Layouts
    xs: list[list[Layouts]]
    dxs: list[list[Layouts]]
    gradients: list[tuple[Ints, Floats]]
    kernels: dict[tuple[int, str], Floats]
    crosses: dict[tuple[int, str], Ints]
    op_grids: OpGrids

    def take(self, keep: Ints) -> NodeTable:
        """The same for some of the candidates only."""

        def cut(s: Layouts) -> Layouts:
            return replace(s, dims=tuple(d[keep] for d in s.dims), partial=s.partial[keep])

        return replace(
            self,
            grids=[self.grids[i] for i in keep],
            **{name: getattr(self, name)[keep] for name in ("seconds", "compute", "summed", "memory")},
            y=cut(self.y),
            xs=[[cut(s) for s in each] for each in self.xs],
            dxs=[[cut(s) for s in each] for each in self.dxs],
            gradients=[(axes[keep], full[keep]) for axes, full in self.gradients],
            kernels={k: v[keep] for k, v in self.kernels.items()},
            crosses={k: v[keep] for k, v in self.crosses.items()},
            op_grids={loop: c[keep] for loop, c in self.op_grids.items()},
        )


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

    def number(self, name: str, grid: OpGrid) -> int | None:
        """Which candidate of a group an op grid is, if any."""
        wanted = {k: tuple(v) for k, v in grid.items() if v}
        try:
            return self.nodes[name].grids.index(wanted)
        except ValueError:
            return None

    def total(self, choice: Mapping[str, int]) -> float:
        """Seconds of the steps of the program that runs, for a choice of candidates."""
        total = sum(float(t.seconds[choice[n]]) for n, t in self.nodes.items())
        total += sum(float(e.table[e.rows[choice[a]], e.columns[choice[b]]]) for (a, b), e in self.edges.items())
        return total + self._messages(choice) - sum(self._shared(choice, *value) for value in self.values)

    def _messages(self, choice: Mapping[str, int]) -> float:
        """Starts of the messages in which gradients travel, less the shares of them that nodes count: a message per set of axes may go
        with room left, and one may take more than its measure."""
        waiting: dict[int, float] = {}
        starts = 0.0
        for name in reversed(self.nodes):
            for sums, sizes in self.nodes[name].gradients:
                axes, full = int(sums[choice[name]]), float(sizes[choice[name]])
                start = float(self.pricing.moves.terms("allreduce", axes)[0].start)
                starts -= start * min(1.0, full)
                if not waiting.get(axes):
                    starts += start
                waiting[axes] = 0.0 if waiting.get(axes, 0.0) + full >= 1 else waiting.get(axes, 0.0) + full
        return starts

    def _shared(self, choice: Mapping[str, int], producer: str, readers: list[tuple[str, int]]) -> float:
        """What readers of one value save because a copy in their layout, or one to slice, was made for an earlier one, or because their
        gradients are added before they move. Edges, which know one reader each, leave it out."""
        y = self.nodes[producer].y.at(choice[producer])
        copies, returned, saved = [y], set(), 0.0
        for name, i in readers:
            t, c = self.nodes[name], choice[name]
            for x in (layouts.at(c) for layouts in t.xs[i]):
                whole = self._seconds(y, x)
                usable = (k for k in copies[1:] if k == x or not self.pricing.moves.cuts.ghosts(np.array(k[1])).any())
                here = [self._seconds(k, x) for k in usable]
                slices = [s for s, moved in here if not moved] if whole[1] else []
                saved += whole[0] - slices[0] if slices else 0.0
                copies.append(x)
            for dx in (layouts.at(c) for layouts in t.dxs[i]):
                saved += self._seconds(dx, (y[0], y[1], 0))[0] if dx in returned else 0.0
                returned.add(dx)
        return saved

    def _seconds(self, src: Place, dst: Place) -> tuple[float, bool]:
        """Seconds of a transition, and whether more than slices is in it."""
        p = self.pricing
        found = stages(p.moves.cuts, src[1], dst[1], src[2], dst[2])
        return sum(float(p.moves.stage(s, src[0], p.item())) for s in found), any(s.kind != "slice" for s in found)


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
        kernels = node.op.backward(self.graph.input_shapes(node.name, self.batch), self.wanted[node.name])
        read = {o.value for k in kernels for o in k.reads}
        return frozenset(x for i, x in enumerate(node.inputs) if f"x{i}" in read)

    def build(self) -> Tables:
        nodes = {name: self.node(name) for name in self.groups}
        edges: dict[tuple[str, str], EdgeTable] = {}
        for b in self.groups:
            for i, x in enumerate(dict.fromkeys(self.graph[b].inputs)):
                if x in self.leader:
                    a = self.leader[x]
                    table = self.edge(nodes[a], nodes[b], i, self.fused.get((a, b), []))
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
        )
        if key not in pricing.memo:
            loops = members[0].op.loops(shapes)
            op, spare = members[0].op, pricing.shares_cores
            grids: Sequence[OpGrid] = (dict(fixed or {}),)
            if fixed is None:
                grids = candidates(loops, pricing.grid, op.splits(shapes), weighted=op.weighted, spare=spare)
                ways = ({loop: pricing.grid.ways(axes) for loop, axes in g.items()} for g in grids)
                grids = tuple(g for g, w in zip(grids, ways, strict=True) if op.trains(shapes, w)) or grids
            op_grids = self.op_grids(grids, tuple(loops))
            low = _Alone(graph, self.batch, members, op_grids, pricing).price(self.wanted)
            spared = {f"{m.name}:y" for m, k in zip(members, kept, strict=True) if k}
            seconds = low.local + low.moved
            for m, count in zip(members, returned, strict=True):
                if count > 1:
                    seconds = seconds + pricing.machine.copy_seconds(low.bytes(f"{m.name}:y")) * count / 2
            sources = list(dict.fromkeys(members[0].inputs))
            moved = {b.partition(":")[::2]: c for b, c in low.crosses.items()}
            table = NodeTable(
                grids=grids,
                seconds=seconds,
                compute=low.local,
                summed=low.summed,
                memory=low.memory(spared),
                y=_many(low.copies[f"{name}:y"][-1:])[0],
                xs=[_many(low.copies[f"{x}:y"]) for x in sources],
                dxs=[_many(low.parts.get(x, ())) for x in sources],
                gradients=low.messages,
                kernels={(self.place[n], v): seconds for (n, v), seconds in low.kernels.items()},
                crosses={(self.place[n], v): where for (n, v), where in moved.items() if n in low.inside},
                op_grids=op_grids,
            )
            for f in fused:
                saved = f.within(pricing, table)
                table.seconds, table.compute = table.seconds - saved, table.compute - saved
            used = reduce(or_, (pricing.moves.cuts.mask(c) for c in op_grids.values()), np.zeros(1, int))
            idle = pricing.moves.ways[used] < pricing.grid.size
            pricing.memo[key] = table.take(np.flatnonzero(~idle | (table.compute <= IDLE * table.compute.min())))
        return pricing.memo[key]

    def op_grids(self, grids: Sequence[OpGrid], loops: tuple[str, ...]) -> dict[str, Ints]:
        """Numbers of the cuts of every loop; lists of candidates are shared by many ops."""
        key = ("op grids", loops, id(grids))
        if key not in self.pricing.memo:
            of = self.pricing.moves.cuts.of
            made = {loop: np.array([of(g.get(loop, ())) for g in grids]) for loop in loops}
            self.pricing.memo[key] = (made, grids)
        return self.pricing.memo[key][0]

    def edge(self, u: NodeTable, v: NodeTable, i: int, fused: Sequence[Fusion]) -> EdgeTable:
        """What a value costs between its producer and a reader, there and back."""
        key = ("edge", id(u), id(v), i, tuple(fused))
        if key not in self.pricing.memo:
            tables = [self.outer(u.y, x) for x in v.xs[i]]
            tables += [_turned(self.outer(dx, u.y.complete)) for dx in v.dxs[i]]
            tables += [f.between(self.pricing, u, v, i) for f in fused]
            self.pricing.memo[key] = (_joined(tables), u, v)  # kept alive: their identities are keys
        return self.pricing.memo[key][0]

    def outer(self, src: Layouts, dst: Layouts) -> EdgeTable:
        (rows, row), (columns, column) = src.classes, dst.classes
        return EdgeTable(self.pricing.table(rows, columns), row, column)

    def added(self, a: EdgeTable, b: EdgeTable) -> EdgeTable:
        key = ("added", id(a), id(b))
        if key not in self.pricing.memo:
            self.pricing.memo[key] = (_joined([a, b]), a, b)
        return self.pricing.memo[key][0]


def _many(copies: Sequence[Copy]) -> list[Layouts]:
    """Layouts of some copies, equal ones once."""
    return list(dict.fromkeys(cast(Layouts, c.layout) for c in copies))


def _turned(e: EdgeTable) -> EdgeTable:
    return EdgeTable(e.table.T, e.columns, e.rows)


def _joined(tables: Sequence[EdgeTable]) -> EdgeTable:
    """The sum of tables over classes, over the coarsest classes that refine all."""
    if len(tables) == 1:
        return tables[0]
    (first, row), (last, column) = (
        distinct(*maps) for maps in zip(*((t.rows, t.columns) for t in tables), strict=True)
    )
    parts = [t.table[np.ix_(t.rows[first], t.columns[last])] for t in tables]
    return EdgeTable(reduce(np.add, parts), row, column)
