"""What the planner prices with, and what it knows about the candidates of one group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lbpar.aside import aside
from lbpar.cost.kernel_time import active_processes, item_bytes, kernel_seconds
from lbpar.cost.machine import Machine
from lbpar.cost.moves import Floats, MovePrices, move_prices
from lbpar.graph.loops import Kernel
from lbpar.layout.cuts import Ints, pick
from lbpar.layout.grid import Grid
from lbpar.layout.many import Layouts, OpGrids
from lbpar.plan.candidates import OpGrid


@dataclass
class Pricing:
    """What the planner prices with, and its memory of what it has priced.

    With stages, ``stages`` is the axis along which they lie, which splits no loop, and layers are priced per micro-batch: what is done once a step
    counts a part of so many ``micro_batches``. With ``fork``, another process prices half of the moves between layers.
    """

    machine: Machine
    grid: Grid
    dtype: str = "float32"
    optimizer: str = "momentum"
    stages: int | None = None
    micro_batches: int = 1
    fork: bool = False
    moves: MovePrices = field(init=False)
    memo: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.moves = move_prices(self.machine, self.grid)

    @property
    def inside(self) -> Grid:
        """The axes that may split loops."""
        return self.grid if self.stages is None else Grid(self.grid.sizes[: self.stages])

    @property
    def shares_cores(self) -> bool:
        """Whether there are more processes than cores."""
        return bool(self.machine.oversubscription(self.grid.size, self.grid.size) > 1)

    def item(self, dtype: str | None = None, parameters: bool = False) -> int:
        """Bytes per element."""
        return item_bytes(dtype, self.dtype, self.machine.half_arrays, parameters)

    def kernel(self, kernel: Kernel, op_grids: OpGrids) -> Floats:
        """Seconds of a kernel on the largest block that each op grid gives."""
        cuts, machine, procs = self.moves.cuts, self.machine, self.grid.size
        ways = {loop: self.moves.ways[cuts.mask(c)] for loop, c in op_grids.items()}
        local = {loop: -(-e // ways[loop]) if loop in ways else e for loop, e in kernel.loops}
        seconds = kernel_seconds(machine, kernel, local, self.dtype)
        if machine.file.cores is not None:
            seconds = seconds * machine.oversubscription(active_processes(kernel, ways, procs), procs)
        return seconds

    def seconds(
        self, layouts: Layouts, transitions: Ints, dtype: str | None = None, parameters: bool = False
    ) -> Floats:
        """Seconds of numbered transitions of a tensor."""
        return self.moves.seconds([(layouts.shape, self.item(dtype, parameters), transitions)])[0]

    def tables(self, pairs: Sequence[tuple[Layouts, Layouts]], parameters: bool = False) -> list[Floats]:
        """Seconds from each of some layouts to each of others, for several tensors (``parameters``: these, or their gradients)."""
        found = self.moves.between(*((src.numbers[:, None], dst.numbers[None, :]) for src, dst in pairs))
        asked = [
            (src.shape, self.item(None, parameters), numbers) for (src, _), numbers in zip(pairs, found, strict=True)
        ]
        half = len(asked) // 2
        with aside(lambda: self.moves.seconds(asked[half:]), self.fork) as rest:
            return [*self.moves.seconds(asked[:half]), *rest()]

    def bytes(self, layouts: Any, dtype: str | None = None, parameters: bool = False) -> Any:
        """Bytes on the rank with the largest block."""
        return self.moves.volumes.size(layouts.shape, layouts.dims) * self.item(dtype, parameters)

    def bucketed(self, layouts: Layouts, axes: Ints, full: Floats, dtype: str | None) -> Floats:
        """Seconds of an allreduce of a gradient that fills a part of a message: its bytes, and its share of the start."""
        size = self.bytes(layouts, dtype, parameters=True)
        p, term = self.moves.ways[axes], self.moves.allreduce(axes)
        return pick(axes > 0, term.start * full + term.byte * 2 * size * (p - 1) / p, 0.0)


@dataclass(eq=False)
class NodeTable:
    """All candidates of one op (with what follows it).

    ``seconds``: node cost; ``compute``: its local part; ``summed``: the sums of weight gradients, which computation can hide;
    ``memory``: bytes that stay until the backward pass, parameters and their companions included; ``weights``: these alone; ``y``: layouts of the output;
    ``xs``, ``dxs``: of each input (in order, equal ones once) those in which it is read, and those of its gradient;
    ``gradients``: of each parameter's gradient the axes (as bits) over which it is summed, and how much of a message it fills;
    ``kernels``: seconds of every kernel, by member and what it writes; ``crosses``: which values of an op move inside it;
    ``op_grids``: the candidates as numbers of cuts; ``shares``: of parameters that several layers have, by member and name, the layouts of the
    values and those of the gradients.
    """

    grids: Sequence[OpGrid]
    seconds: Floats
    compute: Floats
    summed: Floats
    memory: Floats
    weights: Floats
    y: Layouts
    xs: list[list[Layouts]]
    dxs: list[list[Layouts]]
    gradients: list[tuple[Ints, Floats]]
    kernels: dict[tuple[int, str], Floats]
    crosses: dict[tuple[int, str], Ints]
    op_grids: OpGrids
    shares: dict[tuple[int, str], tuple[Layouts, list[Layouts]]] = field(default_factory=dict)

    def take(self, keep: Ints) -> NodeTable:
        """The same for some of the candidates only."""

        if keep.size == len(self.grids):
            return self
        made: dict[int, Layouts] = {}

        def cut(s: Layouts) -> Layouts:
            if id(s) not in made:
                made[id(s)] = s.take(keep)
            return made[id(s)]

        return replace(
            self,
            grids=[self.grids[i] for i in keep],
            **{name: getattr(self, name)[keep] for name in ("seconds", "compute", "summed", "memory", "weights")},
            y=cut(self.y),
            xs=[[cut(s) for s in each] for each in self.xs],
            dxs=[[cut(s) for s in each] for each in self.dxs],
            gradients=[(axes[keep], full[keep]) for axes, full in self.gradients],
            kernels={k: v[keep] for k, v in self.kernels.items()},
            crosses={k: v[keep] for k, v in self.crosses.items()},
            op_grids={loop: c[keep] for loop, c in self.op_grids.items()},
            shares={k: (cut(w), [cut(s) for s in each]) for k, (w, each) in self.shares.items()},
        )
