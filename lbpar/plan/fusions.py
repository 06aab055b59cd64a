"""Which kernels of a network are fused wherever nothing moves between them, and what that saves.

Read from the program of one process, in which nothing moves: what `lbpar.program.fuse` fuses there, it fuses under any plan that
leaves the arrays between those kernels where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lbpar.cost.moves import Floats
from lbpar.cost.price import owner
from lbpar.graph.graph import Graph
from lbpar.graph.loops import Kernel
from lbpar.layout.cuts import distinct
from lbpar.layout.grid import Grid
from lbpar.plan.pricing import NodeTable, Pricing
from lbpar.program.fuse import WHOLE_CHANNELS, fuse, without_copies
from lbpar.program.lowering import Lowering
from lbpar.program.plan import Plan
from lbpar.program.steps import Compute, Step, Sum, reads, writes
from lbpar.solver.search import EdgeTable

#: Stands for what a sum of gradients writes.
SUM = "sum"


@dataclass(frozen=True)
class Fusion:
    """A fused kernel in terms of the groups of layers that it joins: one (0), or a producer (0) and a reader of its value (1).

    Parameters
    ----------
    members : tuple of (group, place, value)
        What the kernels write that it replaces, ``place`` being the layer's in its group; `SUM` for a sum of gradients.
    inside : tuple of (place, value)
        Values between the kernels of one group, which must not move.
    backward : bool
        Whether it runs in the backward pass.
    owner : int
        The group on whose grid it runs.
    kernel : Kernel, optional
        What runs instead; nothing where this is only a further layer's part of it.
    """

    members: tuple[tuple[int, int, str], ...]
    inside: tuple[tuple[int, str], ...]
    backward: bool
    owner: int
    kernel: Kernel | None

    def saved(self, pricing: Pricing, *tables: NodeTable) -> list[Floats]:
        """What each group's kernels cost less than the fused one, for all its candidates; their sum is what fusing saves."""
        out = [np.zeros(len(t.grids)) for t in tables]
        for group, place, value in self.members:
            t = tables[group]
            size = pricing.bytes(t.y)
            out[group] = out[group] + (
                pricing.machine.sum_seconds(size, 2) if value == SUM else t.kernels[place, value]
            )
        if self.kernel is not None:
            out[self.owner] = out[self.owner] - pricing.kernel(self.kernel, tables[self.owner].op_grids)
        return out

    def within(self, pricing: Pricing, table: NodeTable) -> Floats:
        """Seconds that fusing saves in one group, for every candidate."""
        (saved,) = self.saved(pricing, table)
        stays = np.ones(saved.shape, bool)
        for at in self.inside:
            stays &= ~table.crosses.get(at, np.zeros(1, bool))
        if self.kernel is not None and self.kernel.name == WHOLE_CHANNELS:
            stays &= table.op_grids["C"] == 0
        return np.where(stays, saved, 0.0)

    def between(self, pricing: Pricing, u: NodeTable, v: NodeTable, i: int) -> EdgeTable:
        """Seconds (negative) that fusing saves where both groups have the value in one layout."""
        here, there = (u.y.complete, v.dxs[i][0]) if self.backward else (u.y, v.xs[i][0])
        costs = self.saved(pricing, u, v)
        (first, rows), (last, columns) = (
            distinct(side.classes[1], np.unique(c, return_inverse=True)[1].reshape(-1))
            for side, c in zip((here, there), costs, strict=True)
        )
        same = (here.partial[first] == 0)[:, None] & (there.partial[last] == 0)[None, :]
        for a, b in zip(here.dims, there.dims, strict=True):
            same = same & (a[first][:, None] == b[last][None, :])
        saves = costs[0][first][:, None] + costs[1][last][None, :]
        return EdgeTable(np.where(same, -saves, 0.0), rows, columns)


def fusions(graph: Graph, batch: int, groups: Mapping[str, list[str]]) -> dict[tuple[str, ...], list[Fusion]]:
    """All fused kernels of a network's training step, by the groups of layers that they join."""
    leader = {m: name for name, members in groups.items() for m in members}
    place = {m: i for members in groups.values() for i, m in enumerate(members)}
    order = {name: i for i, name in enumerate(groups)}
    out: dict[tuple[str, ...], list[Fusion]] = {}
    for new, on, members, inside in _fused(graph, batch):
        first, *rest = sorted({leader[n] for n, _ in members}, key=lambda g: order[g])
        for g in rest or [first]:
            mine = len(rest) < 2 or g == leader[on]
            joined = (first, g) if rest else (first,)
            here = [m for m in members if leader[m[0]] == g or (mine and leader[m[0]] == first)]
            fusion = Fusion(
                tuple((joined.index(leader[n]), place[n], v) for n, v in here),
                tuple((place[n], v) for n, v in inside if not rest),
                new.phase == "backward",
                joined.index(leader[on]) if mine else 0,
                new.kernel if mine else None,
            )
            out.setdefault(joined, []).append(fusion)
    return out


Names = list[tuple[str, str]]


def _fused(graph: Graph, batch: int) -> Iterator[tuple[Compute, str, Names, Names]]:
    """Each fused kernel with the layer on whose grid it runs, and (layer, value) of what it replaces and of what lies between."""
    program = Lowering(graph, Plan(Grid()), batch).run()
    steps, _ = without_copies(program.steps)
    known = set(map(id, steps))
    maker: dict[str, Step] = {b: s for s in steps for b in writes(s)}
    for new in fuse(replace(program, steps=tuple(steps))).steps:
        if id(new) in known or not isinstance(new, Compute):
            continue
        members: dict[str, Step] = {}
        todo, inside = [b for b in new.writes if b in maker], set()
        while todo:
            step = maker[todo.pop()]
            if writes(step)[0] not in members:
                members[writes(step)[0]] = step
                between = [b for b in reads(step) if b not in new.reads and b in maker]
                inside.update(between)
                todo += between
        named = [
            (s.dst.partition(":")[0], SUM) if isinstance(s, Sum) else (s.node, s.kernel.writes[0].value)
            for s in members.values()
            if isinstance(s, (Sum, Compute))
        ]
        yield new, owner(new, program), named, [(b.partition(":")[0], b.partition(":")[2]) for b in sorted(inside)]
