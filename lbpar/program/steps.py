"""The steps of a program. Every rank has the same steps in the same order; what differs is the blocks they touch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, starmap
from typing import Literal

from lbpar.graph.graph import Graph
from lbpar.graph.loops import Kernel
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.transition import Move
from lbpar.program.plan import Plan

Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class Compute:
    """Run one local kernel of a node on its blocks."""

    node: str
    kernel: Kernel
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    phase: Phase


@dataclass(frozen=True)
class Start:
    """Start a move of the array ``src`` (or do it, where it is local) towards ``dst``.

    ``donate`` says that nothing else reads ``src``, so that its memory may be used.
    """

    move: Move
    src: str
    dst: str
    node: str
    phase: Phase
    donate: bool = False


@dataclass(frozen=True)
class StartMany:
    """Start several allreduces over the same axes as one message. Each has its own wait."""

    starts: tuple[Start, ...]
    phase: Phase

    @property
    def tag(self) -> str:
        """Name under which a transport counts it."""
        return f"{self.starts[0].dst} +{len(self.starts) - 1}"


@dataclass(frozen=True)
class Wait:
    """Wait for the move into ``dst``."""

    dst: str
    phase: Phase


@dataclass(frozen=True)
class Sum:
    """Add local arrays of one layout, times ``weights`` if there are any."""

    srcs: tuple[str, ...]
    dst: str
    phase: Phase
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class Accumulate:
    """Add this rank's part of a parameter's gradient to what earlier micro-batches left.

    With ``last``, the sum goes on to the ranks that share the parameter (once for all micro-batches); else it is kept. ``weight`` is the
    micro-batch's share of the program's samples.
    """

    param: str
    grad: str
    last: bool
    phase: Phase = "backward"
    weight: float = 1.0


@dataclass(frozen=True)
class Update:
    """Apply the optimizer to parameters from their complete gradients: to all, or to those of the stage that is ``at`` one coordinate."""

    params: tuple[str, ...]
    grads: tuple[str, ...]
    phase: Phase = "update"
    at: Dim | None = None


@dataclass(frozen=True)
class Free:
    """Forget arrays that no later step reads."""

    buffers: tuple[str, ...]


Step = Compute | Start | StartMany | Wait | Sum | Accumulate | Update | Free


@dataclass(frozen=True)
class Buffer:
    """An array of a program: its layout and element type (None: the network's). What belongs to a micro-batch knows its ``first`` sample."""

    layout: Layout
    dtype: str | None = None
    first: int = 0


@dataclass(frozen=True)
class Program:
    """The steps of one training or evaluation step.

    Parameters
    ----------
    graph, plan, batch
        What it was made from; ``batch`` is the global number of samples.
    steps : tuple of Step
        In order, the same on all ranks.
    buffers : mapping
        Every array by name.
    feeds : mapping
        Arrays filled from outside: buffer name to the name of the input node.
    params : mapping
        Layout of every parameter and running statistic.
    results : mapping
        Buffers to read at the end: ``loss``, ``output``, and what a loss measures (`lbpar.graph.ops.losses.MEASURED`).
    values : mapping
        Where each value (``conv1:y``, ``conv1:dy``, ``conv1.weight:grad``, ...) is held in its most complete form.
    """

    graph: Graph
    plan: Plan
    batch: int
    steps: tuple[Step, ...]
    buffers: Mapping[str, Buffer]
    feeds: Mapping[str, str]
    params: Mapping[str, Layout]
    results: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def moves(self) -> tuple[Start, ...]:
        """All communication (and local slices), in order."""
        out: list[Start] = []
        for step in self.steps:
            out += step.starts if isinstance(step, StartMany) else (step,) if isinstance(step, Start) else ()
        return tuple(out)

    @cached_property
    def rounds(self) -> tuple[range, ...]:
        """Steps of each round that a mini-batch takes: of one, but with delayed gradients, where the next mini-batch enters after the first.

        Each round ends with an update, and what is freed then; the last one takes what is left.
        """
        ends = [i + 1 for i, step in enumerate(self.steps) if isinstance(step, Update)][:-1]
        for k, end in enumerate(ends):
            while isinstance(self.steps[end], Free):
                end += 1
            ends[k] = end
        return tuple(starmap(range, pairwise((0, *ends, len(self.steps)))))

    def here(self, rank: int) -> Mapping[str, bool]:
        """Whether a rank is where each buffer is (`Layout.holds`)."""
        if rank not in self._here:
            at: dict[Dim | None, bool] = {}
            for b in self.buffers.values():
                if b.layout.at not in at:
                    at[b.layout.at] = b.layout.holds(rank)
            self._here[rank] = {name: at[b.layout.at] for name, b in self.buffers.items()}
        return self._here[rank]

    @cached_property
    def _here(self) -> dict[int, dict[str, bool]]:
        return {}

    def in_rounds(self, mini_batches: int) -> Iterator[tuple[int, int]]:
        """Mini-batch and number of each step that so many mini-batches take, in order: all that are under way go one round further at a time."""
        rounds = self.rounds
        for now in range(mini_batches + len(rounds) - 1):
            for age, steps in enumerate(rounds):
                if 0 <= now - age < mini_batches:
                    yield from ((now - age, i) for i in steps)


def takes_part(step: Step, program: Program, rank: int) -> bool:
    """Whether a rank does anything in a step; others leave it out. An update of all, and frees, pass over what is not there by themselves.

    An exchange between coordinates is done by all ranks of the group, as transports want it.
    """

    if program.plan.pipeline is None:
        return True

    here = program.here(rank)
    match step:
        case Start():
            return here[step.src] or step.move.src.at != step.move.dst.at
        case StartMany():
            return any(here[s.src] for s in step.starts)
        case Update():
            return step.at is None or step.at.runs(program.plan.grid, program.plan.grid.coords(rank)) != ()
        case Free():
            return True
    return any(here[b] for b in writes(step))


def reads(step: Step) -> tuple[str, ...]:
    """Buffers that a step reads."""
    if isinstance(step, Compute):
        return step.reads
    if isinstance(step, Start):
        return (step.src,)
    if isinstance(step, StartMany):
        return tuple(s.src for s in step.starts)
    if isinstance(step, Sum):
        return step.srcs
    if isinstance(step, Accumulate):
        return (step.grad,)
    if isinstance(step, Update):
        return step.grads
    return ()


def writes(step: Step) -> tuple[str, ...]:
    """Buffers that a step makes available."""
    if isinstance(step, Compute):
        return step.writes
    if isinstance(step, (Wait, Sum)):
        return (step.dst,)
    if isinstance(step, Accumulate):
        return (step.grad,)  # in place
    return ()


def renamed(step: Step, names: Mapping[str, str]) -> Step:
    """A step that reads arrays by other names."""
    if not any(b in names for b in reads(step)):
        return step
    if isinstance(step, Compute):
        return replace(step, reads=tuple(names.get(b, b) for b in step.reads))
    if isinstance(step, Start):
        return replace(step, src=names.get(step.src, step.src))
    if isinstance(step, Sum):
        return replace(step, srcs=tuple(names.get(b, b) for b in step.srcs))
    if isinstance(step, Update):
        return replace(step, grads=tuple(names.get(b, b) for b in step.grads))
    return step
