"""One group of layers lowered and priced alone, for all its candidate grids at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import or_

import numpy as np

from lbpar.cost.moves import Floats
from lbpar.cost.price import SLOTS
from lbpar.graph.graph import Graph, Node
from lbpar.graph.loops import Kernel, Operand
from lbpar.layout.cuts import Ints, pick
from lbpar.layout.layout import open_loops
from lbpar.layout.many import Layouts, OpGrids
from lbpar.layout.transition import Stage
from lbpar.plan.pricing import Pricing
from lbpar.program.fuse import COPY
from lbpar.program.lowering import Copy, Lowering
from lbpar.program.order import BUCKET_BYTES
from lbpar.program.plan import Plan
from lbpar.program.steps import Compute
from lbpar.program.words import of_parameters


@dataclass(frozen=True)
class _Moves:
    """A transition of many layouts, as lowering sees it: one move."""

    kind: str
    src: Layouts
    dst: Layouts
    transitions: Ints


class Group(Lowering):
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
        self.returned: dict[tuple[str, str], list[Layouts]] = {}  # layouts of gradients of shared parameters

    def is_fed(self, value: str) -> bool:
        return ":" not in value and value not in self.inside and value in self.graph

    def layouts(self, node, kernel):  # type: ignore[no-untyped-def, override]
        return [self.many(o, kernel, False) for o in kernel.reads], [self.many(o, kernel, True) for o in kernel.writes]

    def many(self, o: Operand, kernel: Kernel, written: bool) -> Layouts:
        """Layouts of an operand; those that are made alike are the same object."""
        key = ("layouts", id(self.op_grids), o.dims, kernel.loops, open_loops(o, kernel, written))
        if key not in self.pricing.memo:
            self.pricing.memo[key] = Layouts.of(o, kernel, self.grid, self.op_grids, written=written)
        return self.pricing.memo[key]

    def moves(self, src, dst):  # type: ignore[no-untyped-def, override]
        (found,) = self.pricing.moves.between((src.numbers, dst.numbers))
        return (_Moves("allreduce" if src.partial.any() else "p2p", src, dst, found),) if found.any() else ()

    def accumulated(self, ghosted):  # type: ignore[no-untyped-def, override]
        if not ghosted.has_ghosts:
            return ()
        cuts, plain = self.pricing.moves.cuts, ghosted.plain
        axes = reduce(or_, (pick(cuts.ghosts(d), cuts.mask(d), 0) for d in ghosted.dims))
        at = np.flatnonzero(axes)
        src, dst = (tuple(d[at] for d in x.dims) for x in (ghosted, plain))
        found = self.pricing.moves.transitions([Stage("accumulate", axes[at], src, dst, at)], axes.size)
        return (_Moves("accumulate", ghosted, plain, found),)

    def move(self, move, src, node):  # type: ignore[no-untyped-def, override]
        dtype = self.buffers[src].dtype
        seconds = self.pricing.seconds(move.src, move.transitions, dtype, of_parameters(src))
        self.crosses[src] = self.crosses.get(src, False) | (move.transitions > 0)
        if ":grad" in src or (self.phase == "update" and move.kind == "allreduce"):
            axes = move.src.partial & ~move.dst.partial
            shards = reduce(or_, (self.pricing.moves.cuts.mask(d) for d in move.src.dims))
            full = 4 * prod(move.src.shape) / self.pricing.moves.ways[shards] / BUCKET_BYTES
            seconds = self.pricing.bucketed(move.src, axes, np.minimum(full, 1), dtype)
            if ":grad" in src:
                seconds = seconds / self.pricing.micro_batches
                self.messages.append((axes, full))
                self.summed = self.summed + seconds
        self.moved = self.moved + seconds
        return self.buffer(src.split("@")[0], move.dst, dtype)

    def _deliver(self, node, kernel, short, buffer, parts):  # type: ignore[no-untyped-def, override]
        if node.owner in self.graph.shared and short[1:] in self.param_names[node.name]:
            self.returned.setdefault((node.name, short[1:]), []).append(self.buffers[buffer].layout)  # type: ignore[arg-type]
        super()._deliver(node, kernel, short, buffer, parts)

    def compute(self, step: Compute) -> None:
        if step.kernel.name == COPY:
            return
        seconds = np.broadcast_to(
            self.pricing.kernel(step.kernel, self.op_grids), self.local.shape
        )  # of no loop: one number
        self.kernels[step.node, step.kernel.writes[0].value] = seconds
        self.local = self.local + seconds
        if step.phase == "backward":
            self.kept |= {b for b in step.reads if b in self.waiting}

    def price(self, wanted: Mapping[str, frozenset[str]]) -> Group:
        """Forward, backward from a complete gradient of the output, update, optimizer."""
        for node in self.nodes:
            self.node_forward(node)
        self.waiting = set(self.buffers) - set(self.params)
        self.phase = "backward"
        for node in reversed(self.nodes):
            if wanted[node.name]:
                if node is not self.graph.loss:
                    self.materialise(f"{node.name}:dy", self.grad_layout(node))
                self.node_backward(node, wanted[node.name], self.parts)
            if node.name in self.graph.shared:
                self.gather_shared(node)
                self.grads |= {name: near[0] for name, near in self.near.items()}
        self.phase = "update"
        for node in self.nodes:
            for k in node.op.update(self.xs[node.name]):
                self.kernel(node, k)
        slower = self.pricing.machine.oversubscription(self.grid.size, self.grid.size)
        for name in self.grads:
            size, slots = self.bytes(name), SLOTS[self.pricing.optimizer]
            update = self.pricing.machine.update_seconds(size, slots) * slower
            self.local = self.local + update / self.pricing.micro_batches
            if self.pricing.micro_batches > 1:  # each adds its own
                self.local = self.local + self.pricing.machine.copy_seconds(size)
        return self

    def bytes(self, buffer: str) -> Floats:
        """Bytes of a buffer on the rank with the largest block."""
        b = self.buffers[buffer]
        return self.pricing.bytes(b.layout, b.dtype, of_parameters(buffer))

    def memory(self, spared: set[str]) -> Floats:
        """Bytes of a batch that stay until the backward pass, but for ``spared`` buffers."""
        return sum((self.bytes(b) for b in self.kept - spared), np.zeros_like(self.local))

    @property
    def weights(self) -> Floats:
        """Bytes of parameters and their companions."""
        copies = {name: 2 + SLOTS[self.pricing.optimizer] if name in self.grads else 1 for name in self.params}
        return sum((self.bytes(name) * n for name, n in copies.items()), np.zeros_like(self.local))
