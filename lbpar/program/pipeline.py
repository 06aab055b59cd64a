"""A program of several micro-batches: the program of each, cut into tasks (a stage's forward or backward pass), in a schedule's order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, Protocol

from lbpar.graph.graph import Graph
from lbpar.layout.layout import Layout
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
        joined.steps += tasks.pop(timed.task, [])
        if timed.task == Task("F", pipeline.count - 1, micros - 1):
            joined.add_up()
    assert not any(tasks.values()), "a schedule leaves out tasks"
    return joined.program()


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

    def add(
        self, program: Program, stretches: Mapping[Stretch, list[Step]], micro: int, first: int, weight: float
    ) -> dict[Task, list[Step]]:
        """Add the arrays of a micro-batch, and return its steps."""
        names = {b: b if b in program.params else f"{b}#{micro}" for b in program.buffers}
        for b, held in program.buffers.items():
            self.buffers[names[b]] = held if b in program.params else replace(held, first=first)
        self.feeds |= {names[b]: source for b, source in program.feeds.items()}
        self.params = program.params
        last = any(isinstance(s, Update) for s in program.steps)
        for value, b in program.values.items():
            whole = b in program.params or (last and value.endswith(":grad"))
            self.values[value if whole else f"{value}#{micro}"] = names[b]
        for result, b in program.results.items():
            self.losses.setdefault(result, []).append((names[b], weight if result == "loss" else 1.0))
        self.updates = [_renamed(s, names, weight) for s in program.steps if isinstance(s, Update)]
        return {
            Task(kind, stage, micro): [_renamed(s, names, weight) for s in steps]
            for (kind, stage), steps in stretches.items()
        }

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
    """The steps of a micro-batch but the update, by the task in which they run, in order."""
    split = pipeline.schedule == "zero-bubble"
    late = _only_for_weights(program) if split else set()
    stages = _Stages(program, pipeline)
    out: dict[Stretch, list[Step]] = {}
    for i, step in enumerate(program.steps):
        if isinstance(step, Update):
            continue
        forward = getattr(step, "phase", "forward") != "backward"
        kind: Kind = "F" if forward else "W" if i in late else "B"
        new = step
        if isinstance(step, (Compute, Start, Wait, Sum)) and step.phase == "update":  # running statistics
            new = replace(step, phase="forward")
        out.setdefault((kind, stages.of(new)), []).append(new)
    return out


class _Stages:
    """Tells the stage of each step of a micro-batch, which are asked for in order.

    A move between stages starts in the stage that has the array, and is waited for in the one that wants it.
    """

    def __init__(self, program: Program, pipeline: Pipeline) -> None:
        self._program, self._stages = program, pipeline.stages
        self._made: dict[str, int] = {}  # buffer -> the stage whose task makes it

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
        if getattr(step, "phase", None) == "backward" and not isinstance(step, Update):
            made = {step.dst} if isinstance(step, Start) else set(writes(step))
            weights = isinstance(step, Compute) and all(o.value in params for o in step.kernel.writes)
            leaves = isinstance(step, Start) and step.move.src.at != step.move.dst.at
            ends = not isinstance(step, Compute) and not leaves and not made & wanted
            if isinstance(step, Accumulate) or weights or ends:
                late.add(i)
                continue
        if not isinstance(step, Update):  # gradients go on to it, but to nobody's input
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
