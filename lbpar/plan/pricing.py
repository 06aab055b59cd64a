"""What the planner prices with, and what it knows about the candidates of one group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lbpar.cost.kernel_time import busy, item_bytes, kernel_seconds
from lbpar.cost.machine import Machine
from lbpar.cost.moves import Floats, MovePrices, move_prices
from lbpar.graph.loops import Kernel
from lbpar.layout.cuts import Ints, pick
from lbpar.layout.grid import Grid
from lbpar.layout.many import Layouts, OpGrids
from lbpar.layout.transition import Stage, stages
from lbpar.plan.candidates import OpGrid


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
