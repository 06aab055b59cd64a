"""Seconds, bytes and messages of every step of a program.

What the executor runs is what is priced: there is no second description of a layer's communication. Bytes and messages
are those of the busiest rank, seconds those of the largest block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from lbpar.config.optimizers import OPTIMIZERS
from lbpar.cost.kernel_time import active_processes, flops, item_bytes, kernel_seconds, local_extents
from lbpar.cost.machine import Machine, Many
from lbpar.cost.moves import prices_of_moves
from lbpar.cost.traffic import longest
from lbpar.graph.loops import Kernel
from lbpar.layout.exchange import allreduce_volume
from lbpar.layout.grid import Axes, Grid
from lbpar.layout.interior import interior_share
from lbpar.layout.layout import Layout
from lbpar.program.recompute import is_again
from lbpar.program.steps import Accumulate, Compute, Free, Phase, Program, Start, StartMany, Step, Sum, Update, Wait
from lbpar.program.words import of_parameters

#: Arrays that an optimizer keeps per parameter, besides the parameter and its gradient.
SLOTS = {"sgd": 0, "momentum": 1} | {k: len(s.slots) for k, s in OPTIMIZERS.sections.items() if k != "sgd"}


@dataclass(frozen=True)
class StepPrice:
    """One step's price.

    Parameters
    ----------
    kind : str
        "compute", "sum", "update", or the kind of a move.
    node : str
        The layer it belongs to; empty for the update of all.
    phase : str
        "forward", "backward" or "update".
    seconds : float
        On the rank with the largest block.
    bytes, messages : int
        Sent by the busiest rank.
    flops : float
        Done by the rank with the largest block.
    group : int
        Processes of the move's sub-communicator.
    what : str
        The kernel's name, or the array that moves.
    again : bool
        It computes an activation again (`lbpar.program.recompute`), or moves one.
    """

    kind: str
    node: str
    phase: Phase
    seconds: float
    bytes: int = 0
    messages: int = 0
    flops: float = 0.0
    group: int = 1
    what: str = ""
    again: bool = False

    @property
    def moves(self) -> bool:
        """Whether it is communication."""
        return self.kind not in LOCAL


LOCAL = ("compute", "sum", "update", "slice", "none")


@dataclass(frozen=True)
class Price:
    """A priced program: one `StepPrice` per step of the program, in its order."""

    steps: tuple[StepPrice, ...]

    @property
    def seconds(self) -> float:
        """All steps one after the other, nothing overlapped."""
        return sum(s.seconds for s in self.steps)

    @property
    def compute_seconds(self) -> float:
        """Local work."""
        return sum(s.seconds for s in self.steps if not s.moves)

    @property
    def move_seconds(self) -> float:
        """Communication."""
        return sum(s.seconds for s in self.steps if s.moves)

    @property
    def bytes(self) -> int:
        """Bytes sent, the busiest rank of each step."""
        return sum(s.bytes for s in self.steps)

    @property
    def messages(self) -> int:
        """Messages sent, the busiest rank of each step."""
        return sum(s.messages for s in self.steps)

    def by(self, key: Callable[[StepPrice], str]) -> dict[str, float]:
        """Seconds summed by a key, largest first."""
        out: dict[str, float] = {}
        for s in self.steps:
            if s.seconds:
                out[key(s)] = out.get(key(s), 0.0) + s.seconds
        return dict(sorted(out.items(), key=lambda kv: -kv[1]))

    def of(self, node: str) -> Iterable[StepPrice]:
        """Steps of one layer."""
        return (s for s in self.steps if s.node == node)


def price(program: Program, machine: Machine, dtype: str = "float32", optimizer: str = "momentum") -> Price:
    """Price every step of a program.

    Parameters
    ----------
    program : Program
        As lowered; the same for all ranks.
    machine : Machine
        Rates and links.
    dtype : str
        The network's type, or ``tf32`` (`lbpar.config.engine.EngineConfig.arithmetic`).
    optimizer : str
        A key of `SLOTS`.
    """
    single = [s for s in program.steps if isinstance(s, Start)]
    asked = [(s.move, item_of(program, s.src, dtype, machine.half_arrays)) for s in single]
    moves = {id(s): found for s, found in zip(single, prices_of_moves(asked, machine), strict=True)}
    return Price(tuple(_step(s, program, machine, dtype, optimizer, moves) for s in program.steps))


def _step(
    step: Step,
    program: Program,
    machine: Machine,
    dtype: str,
    optimizer: str,
    moves: Mapping[int, tuple[float, int, int]],
) -> StepPrice:
    match step:
        case Compute():
            op_grid = tuple(program.plan[owner(step, program)].items())
            seconds, work = _kernel(step.kernel, program.plan.grid, op_grid, machine, dtype)
            again, what = is_again(step.writes[0]), step.kernel.name
            return StepPrice("compute", step.node, step.phase, seconds, flops=work, what=what, again=again)
        case Start():
            seconds, sent, messages = moves[id(step)]
            group = step.move.src.grid.ways(step.move.axes)
            found = (seconds, sent, messages, 0.0, group, step.dst, is_again(step.dst))
            return StepPrice(step.move.kind, step.node, step.phase, *found)
        case StartMany():
            return _many(step, program, machine, dtype)
        case Sum():
            size = local_bytes(program, step.dst, dtype, machine.half_arrays)
            node = step.dst.split(":")[0]
            node = node if node in program.graph else node.rpartition(".")[0]  # of a parameter
            return StepPrice("sum", node, step.phase, machine.sum_seconds(size, len(step.srcs)), what=step.dst)
        case Accumulate():
            size = local_bytes(program, step.grad, dtype, machine.half_arrays)
            return StepPrice(
                "sum", step.param.rsplit(".", 1)[0], step.phase, machine.sum_seconds(size, 2), what=step.grad
            )
        case Update():
            size = max(
                sum(
                    local_bytes(program, p, dtype, machine.half_arrays)
                    for p in step.params
                    if program.params[p].holds(rank)
                )
                for rank in program.plan.places
            )
            procs = program.plan.grid.size
            seconds = float(
                machine.update_seconds(size, SLOTS[optimizer], len(step.params))
                * machine.oversubscription(procs, procs)
            )
            return StepPrice("update", "", step.phase, seconds, what="optimizer")
        case Wait():
            return StepPrice("none", "", step.phase, 0.0, what=step.dst)
        case Free():
            return StepPrice("none", "", "forward", 0.0, what="free")


@lru_cache(maxsize=1 << 15)
def _kernel(
    kernel: Kernel, grid: Grid, op_grid: tuple[tuple[str, Axes], ...], machine: Machine, dtype: str
) -> tuple[float, float]:
    """Seconds and operations of a kernel on the largest block."""
    local: dict[str, Many] = dict(local_extents(kernel, grid, dict(op_grid)))
    if halo := dict(kernel.attrs).get("halo"):  # a part of the outputs: fewer rows of the product
        share = interior_share(halo)
        local["N"] = local["N"] * (share if kernel.name.endswith("_interior") else 1 - share)
    ways = {loop: grid.ways(axes) for loop, axes in op_grid}
    slower = machine.oversubscription(active_processes(kernel, ways, grid.size), grid.size)
    return float(kernel_seconds(machine, kernel, local, dtype) * slower), float(flops(kernel, local))


def _many(step: StartMany, program: Program, machine: Machine, dtype: str) -> StepPrice:
    """Several allreduces in one message: one latency, all their bytes. Nothing is copied: gradients are written where they are sent from."""
    first = step.starts[0].move
    grid, item = first.src.grid, item_of(program, step.starts[0].src, dtype, machine.half_arrays)
    p = grid.ways(first.axes)
    n = sum(layout_size(s.move.src) for s in step.starts)
    most = allreduce_volume(n, p)
    sent, messages = most.elements * item, most.messages
    seconds = float(machine.move_seconds("allreduce", machine.parts(grid, first.axes), float(sent), float(messages)))
    node = step.starts[0].node
    return StepPrice("allreduce", node, step.phase, seconds, sent, messages, 0.0, p, step.tag)


def owner(step: Compute, program: Program) -> str:
    """The layer whose grid a kernel runs on: for fused kernels, the one whose parameters it reads."""
    shared = program.graph.shared
    read = (b for b in step.reads if b in program.params or (shared and of_parameters(b)))
    name = next((b.partition("@")[0].rpartition(".")[0] for b in read), step.node)
    if name not in shared:
        return name
    near = [step.node]  # the layer itself, or what it was fused with
    for at in near:
        if program.graph[at].owner == name:
            return at
        near += program.graph[at].inputs
    return name


@lru_cache(maxsize=1 << 15)
def layout_size(layout: Layout) -> int:
    """Elements of the largest block of a layout."""
    return prod(longest(d, layout.grid) for d in layout.dims)


def item_of(program: Program, buffer: str, dtype: str, halves: bool) -> int:
    """Bytes of an element of a buffer in a network of some type; ``halves`` as for `item_bytes`."""
    return item_bytes(program.buffers[buffer].dtype, dtype, halves, of_parameters(buffer))


def local_bytes(program: Program, buffer: str, dtype: str, halves: bool) -> int:
    """Bytes of a buffer on the rank with the largest block."""
    return layout_size(program.buffers[buffer].layout) * item_of(program, buffer, dtype, halves)
