"""One rank's share of a network: its blocks of the parameters, and the programs that run on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from lbpar.engine.base import Engine
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import MEASURED
from lbpar.layout.grid import Axes
from lbpar.layout.layout import Layout
from lbpar.program.lowering import lower
from lbpar.program.order import BUCKET_BYTES
from lbpar.program.plan import Plan
from lbpar.program.steps import Program
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.delayed import Pipe
from lbpar.runtime.executor import Executor, ProgressMode
from lbpar.runtime.initial import initial_state
from lbpar.runtime.optim.norms import ReducedNorms
from lbpar.runtime.room import check_room
from lbpar.runtime.trace import Tracer
from lbpar.transport.base import Transport

Array = Any
# NumPy's warnings of overflow and NaN: whether the loss is finite is looked at in every step.
QUIET: dict[str, Any] = {"over": "ignore", "invalid": "ignore", "divide": "ignore"}
Mode = Literal["reduce", "accumulate", "last", "evaluate"]


@dataclass(frozen=True)
class StepResult:
    """What one step tells, the same on all ranks: the mean loss over its samples, and how many hits among how many positions.

    Hits are None where the loss has no classes, and those in the top 5 where there are no more than 5. Of an evaluation, ``sums``
    are what metrics follow from (`lbpar.graph.ops.losses.MEASURED`). ``parts`` are the same of each output, if there are several.
    """

    loss: float
    samples: int
    positions: int
    top1: float | None = None
    top5: float | None = None
    sums: Mapping[str, Array] = field(default_factory=dict)
    parts: Mapping[str, StepResult] = field(default_factory=dict)


def norms_over_ranks(
    layouts: Mapping[str, Layout], transport: Transport, engine: Engine, axes: Axes | None = None
) -> ReducedNorms:
    """Norms of whole parameters, of which each rank holds the block that its layout says.

    Collective, when used, over the ranks along some axes (default: all), which hold all blocks of the parameters that are asked for.
    """
    owned = [name for name, layout in layouts.items() if layout.owns(transport.rank)]
    return ReducedNorms(sum_over_ranks(transport, axes), owned, engine)


def sum_over_ranks(transport: Transport, axes: Axes | None = None) -> Callable[[Array], Array]:
    """Sums a small array over the ranks along some axes (default: all), with which it is collective."""
    along = transport.grid.axes if axes is None else axes
    return lambda v: transport.allreduce(v, along, "sum", "norms").wait()


@dataclass
class Worker:
    """Runs steps of a network on one rank.

    Parameters
    ----------
    graph : Graph
        With its loss.
    plan : Plan
        The same on all ranks.
    engine : Engine
    transport : Transport
        Of the plan's grid.
    seed : int
        Fixes initial weights and dropout.
    progress : {"test", "thread", "block"}, optional
        See `Executor`, which also chooses.
    weights : mapping of str to array, optional
        Initial values of whole parameters and running statistics, which replace drawn ones; let go once they are cut.

    Attributes
    ----------
    state : dict of array
        This rank's blocks of all parameters and running statistics.
    layouts : dict of Layout
        Where each of them lives.
    """

    graph: Graph
    plan: Plan
    engine: Engine
    transport: Transport
    seed: int = 0
    state: dict[str, Array] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    weights: Mapping[str, Array] | None = None
    progress: ProgressMode | None = None

    def __post_init__(self) -> None:
        self._executors: dict[tuple[int, Mode, int], Executor] = {}
        self._accumulated: dict[str, Array] = {}
        self._statistics: dict[str, Array] = {}  # as they were before the last step
        self.params = self.graph.params()

    def executor(self, samples: int, mode: Mode = "reduce", slot: int = 0) -> Executor:
        """The executor of steps of ``samples`` samples; made once per number, mode and, where several are under way at a time, slot."""
        key = (samples, mode, slot)
        if key not in self._executors:
            other = self._executors.get((samples, mode, 0))
            program = self.program(samples, mode) if other is None else other.program
            if not self.state:
                check_room(program, self.engine)
                self.layouts = dict(program.params)
                rank, dtype = self.transport.rank, self.engine.dtype
                initial = initial_state(self.params, self.layouts, rank, self.seed, dtype, self.weights)
                self.state.update({name: self.engine.from_host(a) for name, a in initial.items()})
                self.weights = None
            executor = Executor(program, self.engine, self.transport, self.state, self._accumulated)
            if self.transport.size > 1 and self.progress is not None:
                executor.progress = self.progress
            self._executors[key] = executor
        return self._executors[key]

    def program(self, samples: int, mode: Mode = "reduce") -> Program:
        """The program of a step."""
        if mode == "evaluate":
            return lower(self.graph, self.plan, samples, training=False, rims=self.engine.rims)
        return lower(self.graph, self.plan, samples, gradients=mode, bucket_bytes=BUCKET_BYTES, rims=self.engine.rims)

    def run(
        self, feeds: Mapping[str, Array], samples: int, mode: Mode = "reduce", micro_batch: MicroBatch | None = None
    ) -> StepResult:
        """One step. Collective over all ranks.

        Parameters
        ----------
        feeds : mapping
            This rank's block for every buffer of the program's feeds.
        samples : int
            Global number of samples.
        mode : {"reduce", "accumulate", "last", "evaluate"}
            See `lbpar.program.lowering.lower`.
        micro_batch : MicroBatch, optional
            Step counter for dropout, share of the update.
        """
        executor = self.executor(samples, mode)
        executor.micro_batch = micro_batch or MicroBatch(self.seed)
        if mode != "evaluate":
            statistics = [n for n, p in self.params.items() if p.kind == "statistic"]
            self._statistics = {n: self.engine.copy(self.state[n]) for n in statistics}
        with np.errstate(**QUIET):
            executor.run(feeds)
        return self.result(executor, samples)

    def go(
        self, pipe: Pipe, entering: Executor | None, feeds: Mapping[str, Array] | None, tracer: Tracer | None
    ) -> Executor | None:
        """A round of mini-batches under way (`Pipe.go`)."""
        with np.errstate(**QUIET):
            return pipe.go(entering, feeds, tracer)

    def result(self, executor: Executor, samples: int) -> StepResult:
        """What a mini-batch that has come to its end tells; its arrays are let go."""
        named = [o for o in self.graph.compared if f"loss/{o}" in executor.program.results]
        parts = {output: self._measured(executor, samples, output, f"/{output}") for output in named}
        if named:
            result = StepResult(float(executor.value("loss")), samples, samples, parts=parts)
        else:
            result = self._measured(executor, samples, self.graph.output, "")
        executor.arrays = {}
        return result

    def _measured(self, executor: Executor, samples: int, output: str, suffix: str) -> StepResult:
        """Of one output, whose results end in ``suffix``."""
        positions = int(np.prod(self.graph.shapes(samples)[output][:-1]))
        loss, held = float(executor.value(f"loss{suffix}")), executor.program.results
        sums = {name: executor.value(name + suffix) for name in MEASURED if name + suffix in held}
        hits = [float(n) for n in sums.pop("hits", ())]
        if getattr(self.graph.compared[output][1], "ignore_index", None) is not None:
            positions = int(hits.pop())
        top1, top5, *_ = [*hits, None, None]
        return StepResult(loss, samples, positions, top1, top5, sums)

    def first_bad_layer(
        self, feeds: Mapping[str, Array], samples: int, micro_batch: MicroBatch, training: bool = True
    ) -> str | None:
        """Name of the first node (``input`` or ``target`` for the data) that is not finite on some rank, or None.

        Collective over all ranks; runs the forward pass of the last step again, when training with the running statistics of
        before it.
        """
        program = lower(self.graph, self.plan, samples, training=training, keep=True, fused=False)
        steps = tuple(s for s in program.steps if getattr(s, "phase", "forward") == "forward")
        executor = Executor(replace(program, steps=steps), self.engine, self.transport, self.state)
        for name, array in self._statistics.items() if training else ():
            self.engine.copy(array, out=self.state[name])
        executor.micro_batch = micro_batch
        with np.errstate(**QUIET):
            executor.run(feeds)
        mine = next((n for n in self._order() if not self._finite(n, executor, feeds)), None)
        places = [self._order().index(n) for n in self.transport.allgather_obj(mine) if n is not None]
        return self._order()[min(places)] if places else None

    def _order(self) -> list[str]:
        """Nodes, data first."""
        return [n.name for n in (*self.graph.inputs, *self.graph.ops)]

    def _finite(self, node: str, executor: Executor, feeds: Mapping[str, Array]) -> bool:
        program = executor.program
        fed = [feeds[b] for b, source in program.feeds.items() if source == node and b in feeds]  # on the host
        made = [executor.arrays.get(b) for v, b in program.values.items() if v.partition("#")[0] == f"{node}:y"]
        held = [*fed, *(self.engine.to_host(a) for a in made if a is not None)]
        return all(np.isfinite(a).all() for a in held)

    def move_kinds(self) -> dict[str, str]:
        """Kind of each move of the training steps, by the buffer that it fills."""
        executors = [e for (_, mode, _), e in self._executors.items() if mode != "evaluate"]
        return {s.dst: s.move.kind for e in executors for s in e.program.moves}

    def spent(self) -> dict[str, float]:
        """Seconds per kind of step since the last call."""
        out: dict[str, float] = {}
        for executor in self._executors.values():
            for kind, s in executor.spent().items():
                out[kind] = out.get(kind, 0.0) + s
        return out
