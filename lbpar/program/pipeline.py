"""A program of several micro-batches: the program of each, cut into tasks (a stage's forward or backward pass), in a schedule's order.

With delayed gradients, that of one mini-batch, in which every stage is updated right behind its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, Protocol

from lbpar.graph.graph import Graph
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.runs import block
from lbpar.layout.transition import transition
from lbpar.program.plan import Pipeline, Plan
from lbpar.program.schedule import Kind, Task, timeline
from lbpar.program.steps import Accumulate, Buffer, Compute, Program, Start, Step, Sum, Update, Wait, reads, writes

Gradients = Literal["reduce", "accumulate", "last"]
Stretch = tuple[Kind, int]  # a task of any micro-batch


class Part(Protocol):
    """Lowers a micro-batch of so many samples."""

    def __call__(self, samples: int, gradients: Gradients, alone: bool = True) -> Program: ...


def pipelined(graph: Graph, plan: Plan, batch: int, gradients: Gradients, part: Part) -> Program:
    """The steps of all micro-batches of a training step, not yet ordered for overlap.

    Running statistics are updated in each micro-batch's forward pass, as if the micro-batches came one after the other.

    Parameters
    ----------
    graph, plan, batch
        As for `lbpar.program.lowering.lower`; the plan has a pipeline.
    gradients : {"reduce", "accumulate", "last"}
        Of the whole program.
    part : callable
        Lowers a micro-batch: an unordered program, with no step of its own for ``loss`` and ``hits`` to reach all ranks if not ``alone``.
    """
    pipeline = plan.pipeline
    assert pipeline is not None and graph.loss is not None
    if pipeline.delayed:
        return _delayed(part(batch, gradients), pipeline)
    micros = min(pipeline.micro_batches, batch)
    if micros <= 1:
        return part(batch, gradients)
    bounds = [block(0, batch, micros, i) for i in range(micros)]
    made: dict[tuple[int, Gradients], tuple[Program, dict[Stretch, list[Step]]]] = {}
    joined = _Joined(graph, plan, batch)
    tasks: dict[Task, list[Step]] = {}
    for i, (lo, hi) in enumerate(bounds):
        own: Gradients = "accumulate" if i < micros - 1 or gradients == "accumulate" else "last"
        if (hi - lo, own) not in made:
            program = part(hi - lo, own, False)
            made[hi - lo, own] = program, _cut(program, pipeline)
        tasks |= joined.add(*made[hi - lo, own], i, lo, (hi - lo) / batch)
    for timed in timeline(pipeline.schedule, pipeline.count, plan.grid.ways(pipeline.axes), micros):
        joined.steps += joined.once(tasks.pop(timed.task, []))
        if timed.task == Task("F", pipeline.count - 1, micros - 1):
            joined.add_up()
    assert not any(tasks.values()), "a schedule leaves out tasks"
    return joined.program()


def _delayed(program: Program, pipeline: Pipeline) -> Program:
    """All forward passes, then the backward pass of each stage, the last one first, and its update.

    Each but the last stage's backward pass is one round later than the one before (`Program.rounds`). Meanwhile other mini-batches go their way:
    in a round, a place makes a forward pass of one mini-batch and a backward pass of another.
    """
    tasks = _cut(program, pipeline)
    grads = {p: g for s in program.steps if isinstance(s, Update) for p, g in zip(s.params, s.grads, strict=True)}
    steps = [s for stage in range(pipeline.count) for s in tasks.get(("F", stage), ())]
    for stage in reversed(range(pipeline.count)):
        own = tuple(p for p in grads if pipeline.stages[p.rpartition(".")[0]] == stage)
        at = Dim.only(pipeline.axes, stage) if pipeline.axes else None
        shared = [s for s in program.steps if _is_last(s) and not isinstance(s, Update) and _shared(s) in own]
        steps += [*tasks.get(("B", stage), ()), *shared, Update(own, tuple(grads[p] for p in own), at=at)]
    return replace(program, steps=tuple(steps))


class _Joined:
    """The program of all micro-batches, as it grows."""

    def __init__(self, graph: Graph, plan: Plan, batch: int) -> None:
        self.graph, self.plan, self.batch = graph, plan, batch
        self.steps: list[Step] = []
        self.updates: list[Step] = []
        self.buffers: dict[str, Buffer] = {}
        self.feeds: dict[str, str] = {}
        self.params: Mapping[str, Layout] = {}
        self.results: dict[str, str] = {}
        self.values: dict[str, str] = {}
        self.losses: dict[str, list[tuple[str, float]]] = {}  # result -> each micro-batch's, and its weight
        self.trained = {n for n, p in graph.params().items() if p.kind != "statistic"}
        self.moved: set[tuple[type[Step], str]] = set()

    def add(
        self, program: Program, stretches: Mapping[Stretch, list[Step]], micro: int, first: int, weight: float
    ) -> dict[Task, list[Step]]:
        """Add the arrays of a micro-batch, and return its steps."""
        names = {b: b if self.is_of_all(b, program) else f"{b}#{micro}" for b in program.buffers}
        for b, held in program.buffers.items():
            self.buffers[names[b]] = held if names[b] == b else replace(held, first=first)
        self.feeds |= {names[b]: source for b, source in program.feeds.items()}
        self.params = program.params
        last = any(isinstance(s, Update) for s in program.steps)
        for value, b in program.values.items():
            whole = b in program.params or (last and value.endswith(":grad"))
            self.values[value if whole else f"{value}#{micro}"] = names[b]
        for result, b in program.results.items():
            self.losses.setdefault(result, []).append((names[b], weight if result.partition("/")[0] == "loss" else 1.0))
        self.updates = [_renamed(s, names, weight) for s in program.steps if _is_last(s)]
        return {
            Task(kind, stage, micro): [_renamed(s, names, weight) for s in steps]
            for (kind, stage), steps in stretches.items()
        }

    def is_of_all(self, buffer: str, program: Program) -> bool:
        """Whether an array is the same for all micro-batches: a parameter, or a copy of one (which layers share) in another layout."""
        return buffer in program.params or buffer.partition("@")[0] in self.trained

    def once(self, steps: list[Step]) -> list[Step]:
        """A task's steps without the moves of parameters that an earlier one has made."""
        out: list[Step] = []
        for step in steps:
            if isinstance(step, (Start, Wait)) and "#" not in step.dst:
                if (type(step), step.dst) in self.moved:
                    continue
                self.moved.add((type(step), step.dst))
            out.append(step)
        return out

    def add_up(self) -> None:
        """Add the losses and hits of all micro-batches where they are, and let every rank know them."""
        for result, parts in self.losses.items():
            buffers, weights = zip(*parts, strict=True)
            held = replace(self.buffers[buffers[0]], first=0)
            name = self._new(result, held)
            self.steps.append(Sum(buffers, name, "forward", weights))
            for move in transition(held.layout, replace(held.layout.complete, at=None)):
                dst = self._new(result, replace(held, layout=move.dst))
                assert self.graph.loss is not None
                self.steps += [Start(move, name, dst, self.graph.loss.name, "forward"), Wait(dst, "forward")]
                name = dst
            self.results[result] = name

    def _new(self, base: str, held: Buffer) -> str:
        name, k = f"{base}:sum", 1
        while name in self.buffers:
            name, k = f"{base}:sum@{k}", k + 1
        self.buffers[name] = held
        return name

    def program(self) -> Program:
        steps = (*self.steps, *self.updates)
        made = (self.buffers, self.feeds, self.params, self.results, self.values)
        return Program(self.graph, self.plan, self.batch, steps, *made)


def _cut(program: Program, pipeline: Pipeline) -> dict[Stretch, list[Step]]:
    """The steps of a micro-batch but those at the end, by the task in which they run, in order."""
    split = pipeline.schedule == "zero-bubble"
    late = _only_for_weights(program) if split else set()
    stages = _Stages(program, pipeline)
    out: dict[Stretch, list[Step]] = {}
    for i, step in enumerate(program.steps):
        if _is_last(step):
            continue
        forward = getattr(step, "phase", "forward") != "backward"
        kind: Kind = "F" if forward else "W" if i in late else "B"
        new = step
        if isinstance(step, (Compute, Start, Wait, Sum)) and step.phase == "update":  # running statistics
            new = replace(step, phase="forward")
        out.setdefault((kind, stages.of(new)), []).append(new)
    return out


def _is_last(step: Step) -> bool:
    """Whether a step comes behind all micro-batches: the update, and what brings gradients of shared parameters to it from other grids and stages."""
    made = (step.dst,) if isinstance(step, Start) else writes(step)
    return isinstance(step, Update) or (
        getattr(step, "phase", None) == "update" and any(b.partition("@")[0].endswith(":grad") for b in made)
    )


def _shared(step: Step) -> str:
    """The shared parameter whose gradients a step brings together."""
    made = step.dst if isinstance(step, Start) else writes(step)[0]
    return made.partition(":")[0]


class _Stages:
    """Tells the stage of each step of a micro-batch, which are asked for in order.

    A move between stages starts in the stage that has the array, and is waited for in the one that wants it.
    """

    def __init__(self, program: Program, pipeline: Pipeline) -> None:
        self._program, self._stages = program, pipeline.stages
        # Buffer -> the stage whose task makes it.
        self._made = {p: self._node(p.rpartition(".")[0]) for p in program.params}

    def of(self, step: Step) -> int:
        if isinstance(step, Compute):
            stage = self._node(step.node)
        elif isinstance(step, Accumulate):
            stage = self._made[step.grad]
        elif isinstance(step, Wait):
            return self._made[step.dst]
        elif isinstance(step, Start):
            stage = self._home(step.src, step.node, [step.src])
            self._made[step.dst] = self._home(step.dst, step.node, [step.src])
            return stage
        else:
            assert isinstance(step, Sum)
            stage = self._home(step.dst, step.dst.split(":")[0], step.srcs)
        for b in writes(step):
            self._made.setdefault(b, stage)
        return stage

    def _node(self, name: str) -> int:
        return self._stages.get(name, 0)

    def _home(self, buffer: str, wanted_by: str, sources: Iterable[str]) -> int:
        """The stage of the node that wants an array if the array is there, else that in which the last of its sources is made."""
        if wanted_by not in self._stages:  # the gradient of the network's input
            return min((self._made[b] for b in sources if b in self._made), default=0)
        if self._program.buffers[buffer].layout.at == self._program.plan.at(wanted_by):
            return self._node(wanted_by)
        return min(self._made[b] for b in sources)


def _only_for_weights(program: Program) -> set[int]:
    """Numbers of the backward steps that only gradients of parameters wait for."""
    steps = program.steps
    params = {f"d{p.rpartition('.')[2]}" for p in program.graph.params()}
    wanted: set[str] = set()  # by steps of another kind
    late: set[int] = set()
    for i in range(len(steps) - 1, -1, -1):
        step = steps[i]
        if _is_last(step):  # gradients go on to it, but to nobody's input
            continue
        if getattr(step, "phase", None) == "backward":
            made = {step.dst} if isinstance(step, Start) else set(writes(step))
            weights = isinstance(step, Compute) and all(o.value in params for o in step.kernel.writes)
            leaves = isinstance(step, Start) and step.move.src.at != step.move.dst.at
            ends = not isinstance(step, Compute) and not leaves and not made & wanted
            if isinstance(step, Accumulate) or weights or ends:
                late.add(i)
                continue
        wanted |= set(reads(step))
        if isinstance(step, Wait):
            wanted.add(step.dst)
    return late


def _renamed(step: Step, names: Mapping[str, str], weight: float) -> Step:
    """A step on the arrays of a micro-batch of some weight."""
    match step:
        case Compute():
            read, written = (tuple(names[b] for b in x) for x in (step.reads, step.writes))
            return replace(step, reads=read, writes=written)
        case Start():
            return replace(step, src=names[step.src], dst=names[step.dst])
        case Wait():
            return replace(step, dst=names[step.dst])
        case Sum():
            return replace(step, srcs=tuple(names[b] for b in step.srcs), dst=names[step.dst])
        case Accumulate():
            return replace(step, grad=names[step.grad], weight=weight)
        case Update():
            return replace(step, grads=tuple(names[b] for b in step.grads))
    raise AssertionError(f"{type(step).__name__} before steps are ordered")
