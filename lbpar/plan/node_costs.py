"""What each candidate grid costs inside one op, for all candidates at once.

Kernels forward and backward, the sums of inner statistics and of weight gradients, ghosts of the output's gradient, and
the optimizer; plus the layouts in which the op reads and writes, from which edges are priced. The numbers are those
that lowering the op on its own and pricing the steps would give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from lbpar.cost.kernel_time import busy, item_bytes, kernel_seconds, local_size
from lbpar.cost.machine import Machine
from lbpar.cost.price import SLOTS
from lbpar.graph.loops import Index, Kernel, Operand, Shape
from lbpar.graph.op import Op
from lbpar.layout.grid import Grid
from lbpar.plan.candidates import OpGrid
from lbpar.plan.cuts import Cuts, Floats, Ints, ghosts
from lbpar.plan.moves import Links, Read


@dataclass
class Pricing:
    """What the planner prices with, and its memory of what it has priced."""

    machine: Machine
    grid: Grid
    dtype: str = "float32"
    optimizer: str = "momentum"
    links: Links = field(init=False)
    cuts: Cuts = field(init=False)
    memo: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.links, self.cuts = Links(self.machine, self.grid), Cuts(self.grid)

    @property
    def shares_cores(self) -> bool:
        """Whether there are more processes than cores."""
        return bool(self.machine.turns(self.grid.size, self.grid.size) > 1)

    @property
    def item(self) -> int:
        """Bytes per element of activations."""
        return item_bytes(None, self.dtype)


@dataclass
class Side:
    """A tensor as each candidate reads or writes it.

    Parameters
    ----------
    shape : tuple of int
        Global shape.
    cuts : integer array, shape (candidates, dims)
        Cut of every dimension.
    partial : integer array, shape (candidates,)
        Axes over which it is partial, as bits.
    reads : tuple of Read
        Window of every dimension.
    """

    shape: Shape
    cuts: Ints
    partial: Ints
    reads: tuple[Read, ...]


@dataclass(eq=False)
class NodeTable:
    """All candidates of one op (with what follows it).

    ``seconds``: node cost; ``compute``: its local part; ``summed``: the sums of weight gradients, which computation can hide; ``memory``: bytes that stay until the backward pass, parameters and
    their companions included; ``y``, ``xs``, ``dxs``: layouts of the output, the inputs, the inputs' gradients.
    """

    grids: Sequence[OpGrid]
    seconds: Floats
    compute: Floats
    summed: Floats
    memory: Floats
    y: Side
    xs: dict[int, Side]
    dxs: dict[int, Side]


def _loop_cuts(loop: str, grids: Sequence[OpGrid], p: Pricing) -> Ints:
    """Cut of a loop in every candidate; lists of candidates are shared by many ops."""
    key = ("cuts", loop, id(grids))
    known = p.memo.get(key)
    if known is None:
        known = p.memo[key] = (np.array([p.cuts.add(g.get(loop, ())) for g in grids]), grids)
    return known[0]


class _Node:
    def __init__(self, op: Op, xs: Sequence[Shape], grids: Sequence[OpGrid], p: Pricing) -> None:
        self.op, self.xs, self.grids, self.p = op, tuple(xs), grids, p
        self.count = len(grids)
        self.loop_cuts = {loop: _loop_cuts(loop, grids, p) for loop in op.loops(xs)}
        masks = p.cuts.mask_array()
        self.masks = {loop: masks[c] for loop, c in self.loop_cuts.items()}
        self.params = set(op.params(xs))
        self.compute = np.zeros(self.count)
        self.moves = np.zeros(self.count)
        self.summed = np.zeros(self.count)
        self.memory = np.zeros(self.count)
        self.written: dict[str, tuple[Operand, Ints]] = {}
        self.done: set[Any] = set()

    def local(self, kernel: Kernel) -> dict[str, Ints]:
        return {
            loop: self.p.cuts.blocks(e)[self.loop_cuts[loop]] if loop in self.loop_cuts else np.array(e)
            for loop, e in kernel.loops
        }

    def cut_of(self, index: Index) -> Ints:
        """Cut of a dimension per candidate: that of the (by the rules, only) loop of it that is split."""
        out = np.zeros(self.count, np.int64)
        for loop in index.loops:
            if loop in self.loop_cuts:
                out = np.maximum(out, self.loop_cuts[loop])
        return out

    def partial(self, operand: Operand, kernel: Kernel, *, written: bool) -> Ints:
        own = {loop for i in operand.dims for loop in i.loops}
        loops = set(operand.varying)
        if written:
            loops |= {loop for loop, _ in kernel.loops if loop not in own}
        out = np.zeros(self.count, np.int64)
        for loop in loops:
            if loop in self.masks:
                out = out | self.masks[loop]
        return out

    def side(self, operand: Operand, kernel: Kernel, *, written: bool, plain: bool = False) -> Side:
        extents = dict(kernel.loops)
        reads = tuple(
            Read(i.window, extents[i.loops[0]], i.transposed) if i.window is not None and not plain else Read()
            for i in operand.dims
        )
        cuts = np.stack([self.cut_of(i) for i in operand.dims], 1) if operand.dims else np.zeros((self.count, 0), int)
        return Side(operand.shape, cuts, self.partial(operand, kernel, written=written), reads)

    def size(self, operand: Operand, kernel: Kernel) -> Floats:
        local = local_size(operand, self.local(kernel), dict(kernel.loops))
        return np.broadcast_to(np.asarray(local, float), (self.count,))

    def allreduce(self, operand: Operand, kernel: Kernel, group: Ints) -> None:
        if group.any():
            size = self.size(operand, kernel) * item_bytes(operand.dtype, self.p.dtype)
            self.moves += self.p.links.allreduce(group, size)

    def halo(self, side: Side, item: int, *, back: bool = False) -> None:
        """Ghosts of a side, fetched from the plain cut (or, ``back``, added into it)."""
        group = np.zeros(self.count, np.int64)
        sent, own, readers, held = (np.ones(self.count) for _ in range(4))
        masks = self.p.cuts.mask_array()
        for i, (extent, read) in enumerate(zip(side.shape, side.reads, strict=True)):
            numbers = side.cuts[:, i]
            if read.window is None:
                b = self.p.cuts.blocks(extent)[numbers]
                sent, own, held = sent * b, own * b, held * b
                continue
            unique, where = np.unique(numbers, return_inverse=True)
            found = [ghosts(extent, read.loop, self.p.cuts.sizes[c], read.window, read.transposed) for c in unique]
            rows = [
                (g.active, g.back_sent, g.back_own, g.back_readers, g.own)
                if back
                else (g.active, g.sent, g.own, g.readers, g.held)
                for g in found
            ]
            active, s, o, r, h = np.array(rows, float)[where.reshape(-1)].T
            group |= np.where(active > 0, masks[numbers], 0)
            sent, own, readers, held = sent * s, own * o, readers * r, held * h
        if group.any():
            seconds = self.p.links.messages(group, (sent - own) * item, readers - 1)
            self.moves += np.where(group > 0, seconds + self.p.machine.copy_seconds(held * item), 0.0)

    def run(self, kernel: Kernel, home: Operand | None) -> None:
        machine, procs = self.p.machine, self.p.grid.size
        seconds = kernel_seconds(machine, kernel, self.local(kernel), self.p.dtype)
        if machine.file.cores is not None:
            ways = {loop: self.p.cuts.ways()[cut] for loop, cut in self.loop_cuts.items()}
            seconds = seconds * machine.turns(busy(kernel, ways, procs), procs)
        self.compute += seconds
        for o in kernel.reads:
            if o.value == "dy" and home is not None:
                key = ("dy", o.dims)
                if key not in self.done and o.dims != home.dims:
                    self.halo(self.side(o, kernel, written=False), self.p.item)
                self.done.add(key)
            elif o.value in self.written:
                held = self.written[o.value][1]
                seen = (o.value, o.varying)
                if seen not in self.done:
                    self.done.add(seen)
                    self.allreduce(o, kernel, held & ~self.partial(o, kernel, written=False))
        for o in kernel.writes:
            if o.value not in self.params:
                self.written[o.value] = (o, self.partial(o, kernel, written=True))

    def table(self, wanted: frozenset[str], keep_y: bool) -> NodeTable:
        op, xs, p = self.op, self.xs, self.p
        forward = op.forward(xs, True)
        sides: dict[int, Side] = {}
        dxs: dict[int, Side] = {}
        home: Operand | None = None
        y: Side | None = None
        sizes: dict[str, Floats] = {}
        for k in forward:
            self.run(k, None)
            for o in k.reads:
                if _is_input(o.value):
                    sides.setdefault(int(o.value[1:]), self.side(o, k, written=False))
            for o in (*k.reads, *k.writes):
                sizes.setdefault(o.value, self.size(o, k) * item_bytes(o.dtype, p.dtype))
            for o in k.writes:
                if o.value == "y":
                    home, y = o, self.side(o, k, written=True)
        assert home is not None and y is not None, f"{op.kind} writes no y"
        kept: set[str] = set()
        for k in op.backward(xs, wanted):
            self.run(k, home)
            kept |= {o.value for o in k.reads} - {"dy"}
            for o in k.writes:
                name = o.value
                if name[:2] == "dx" and name[2:].isdigit():
                    if k.push:
                        self.halo(self.side(o, k, written=True), p.item, back=True)
                    dxs[int(name[2:])] = self.side(o, k, written=True, plain=k.push)
                elif name[1:] in self.params:
                    before = self.moves.copy()
                    self.allreduce(o, k, self.partial(o, k, written=True))
                    self.summed += self.moves - before
        for k in op.update(xs):
            self.run(k, None)
        self._results()
        self._parameters()
        keep = {v for v in kept if v in sizes and v not in self.params and (v != "y" or keep_y)}
        self.memory += sum((sizes[v] for v in keep), start=np.zeros(self.count))
        seconds = self.compute + self.moves
        return NodeTable(self.grids, seconds, self.compute, self.summed, self.memory, y, sides, dxs)

    def _results(self) -> None:
        """A loss' value and hits are summed so that every rank knows them."""
        if self.op.no_grad:
            for short in ("y", "hits"):
                if short in self.written:
                    operand, held = self.written[short]
                    size = float(item_bytes("float64", self.p.dtype) * prod(operand.shape))
                    self.moves += self.p.links.allreduce(held, np.full(self.count, size))

    def _parameters(self) -> None:
        p = self.p
        for param in self.op.params(self.xs).values():
            size = np.full(self.count, float(p.item if param.kind != "statistic" else 8))
            for i in param.dims:
                size = size * p.cuts.blocks(i.extent)[self.cut_of(i)]
            trained = param.kind != "statistic"
            self.memory += size * (2 + SLOTS[p.optimizer] if trained else 1)
            if trained:
                turns = p.machine.turns(p.grid.size, p.grid.size)
                self.compute += p.machine.update_seconds(size, SLOTS[p.optimizer]) * turns


def _is_input(value: str) -> bool:
    return value[0] == "x" and value[1:].isdigit()


def node_table(
    op: Op, xs: Sequence[Shape], wanted: frozenset[str], keep_y: bool, grids: Sequence[OpGrid], pricing: Pricing
) -> NodeTable:
    """Price all candidate grids of an op.

    Parameters
    ----------
    op, xs
        The op and the global shapes of its inputs.
    wanted : frozenset of str
        Gradients that the backward pass makes (``dx0``, ``dweight``).
    keep_y : bool
        Count the output among what is kept (if its backward pass reads it): no reader keeps it anyway.
    grids : list of op grids
        The candidates.
    """
    return _Node(op, xs, grids, pricing).table(wanted, keep_y)


def thin(table: NodeTable, keep: Ints) -> NodeTable:
    """The same for some of the candidates only."""

    def cut(s: Side) -> Side:
        return Side(s.shape, s.cuts[keep], s.partial[keep], s.reads)

    def all_of(sides: Mapping[int, Side]) -> dict[int, Side]:
        return {i: cut(s) for i, s in sides.items()}

    grids = [table.grids[i] for i in keep]
    return NodeTable(
        grids,
        table.seconds[keep],
        table.compute[keep],
        table.summed[keep],
        table.memory[keep],
        cut(table.y),
        all_of(table.xs),
        all_of(table.dxs),
    )
