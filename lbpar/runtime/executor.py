"""Run a program on one rank, with an engine and a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np

from lbpar.engine.base import Engine
from lbpar.graph.ops.losses import MEASURED
from lbpar.program.steps import (
    Accumulate,
    Compute,
    Free,
    Program,
    Start,
    StartMany,
    Step,
    Sum,
    Update,
    Wait,
    takes_part,
)
from lbpar.program.whole_norms import whole_norms
from lbpar.program.words import micro_batch, of_parameters
from lbpar.runtime.background import Background
from lbpar.runtime.binding import Bound, Call, MicroBatch, bind
from lbpar.runtime.buckets import PLACED, Buckets
from lbpar.runtime.recorded import Recorded, Run
from lbpar.runtime.trace import Tracer
from lbpar.runtime.transfers import Finish, Transfers
from lbpar.transport.base import Transport

Array = Any
ProgressMode = Literal["test", "thread", "block"]
SMALL = ("loss", *MEASURED)
"""Results that the host wants of every step."""
UpdateRule = Callable[[Mapping[str, Array], Mapping[str, Array]], None]


class Executor:
    """One rank's run of a program.

    Parameters
    ----------
    program : Program
        The same on all ranks.
    engine : Engine
        Local kernels.
    transport : Transport
        Carries moves; its grid must be the program's.
    state : dict of array
        This rank's blocks of all parameters and running statistics, by name; updated in place.
    accumulated : dict of array, optional
        Where gradients of micro-batches wait for the last one; shared by the programs of one training run.
    whole : bool
        Norms that the engine computes in one go are one kernel; otherwise each part takes its own time.

    Attributes
    ----------
    arrays : dict of array
        Those alive now, by buffer.
    micro_batch : MicroBatch
        Set before each run.
    on_update : callable, optional
        ``on_update(params, grads)`` applies the optimizer to this rank's blocks.
    before_update : callable, optional
        Called with the parameters that are about to change.
    tracer : Tracer, optional
        Gets every step's times.
    label : str
        Added to the names of steps in the trace.
    progress : {"test", "thread", "block"}
        How moves under way progress meanwhile: tested after each kernel, by a thread, or only in starts and waits (allreduces then
        wholly in waits). Default: "block" where the ranks copy messages with cores of their own on one node, which then loses nothing,
        unless stages wait for what others send while they compute.
    """

    def __init__(
        self,
        program: Program,
        engine: Engine,
        transport: Transport,
        state: dict[str, Array],
        accumulated: dict[str, Array] | None = None,
        whole: bool = True,
    ) -> None:
        program = whole_norms(program) if whole and engine.whole_norms else program
        self.program, self.engine, self.transport, self.state = program, engine, transport, state
        self._targets = {n.name for n in program.graph.targets}
        self.micro_batch = MicroBatch()
        self.on_update: UpdateRule | None = None
        self.before_update: Callable[[Mapping[str, Array]], None] | None = None
        self._arrays: dict[str, Array] = {}  # one dictionary for good: what runs a step holds on to it
        self._seconds: dict[str, float] = {}
        self._timed: list[list[tuple[str, Any, Any]]] = []  # kind, start and end of what newest runs did
        self._fetched: dict[str, Callable[[], Any]] = {}
        self.tracer: Tracer | None = None
        self.label = ""
        self._ran = False
        self._accumulated = {} if accumulated is None else accumulated
        self._pending: dict[str, Finish] = {}
        self._transfers = Transfers(engine, transport)
        staged = any(s.move.src.at != s.move.dst.at for s in program.moves)
        if staged:  # not all ranks would come to make a group when a stage first uses it
            groups = {s.move.axes for s in program.moves if program.plan.grid.ways(s.move.axes) > 1}
            transport.prepare(sorted(groups))
        self.progress = "block" if transport.size == 1 or (self._transfers.deferred and not staged) else "test"
        self._buckets = Buckets(program, engine, transport.rank)
        self._kinds = {s.dst: s.move.kind for s in program.moves}
        # One for each step, so that ranks in one process keep in step; None where this rank has no part in it.
        here = [takes_part(step, program, transport.rank) for step in program.steps]
        self._runs = [self._prepare(s) if mine else None for s, mine in zip(program.steps, here, strict=True)]
        self._stretches = [self._join(steps) for steps in program.rounds]
        self._recorded: Recorded | None = None
        if engine.captures and not staged and (transport.size == 1 or transport.recordable):
            runs = [run for run in self._runs if run]
            self._recorded = Recorded(program, engine, transport, self._arrays, self._pending, runs)

    @property
    def progress(self) -> ProgressMode:
        """How moves under way progress."""
        return self._progress

    @progress.setter
    def progress(self, progress: ProgressMode) -> None:
        self._progress: ProgressMode = progress
        # What moves by itself gains nothing by waiting, and what is recorded must not hang on which call finds it first.
        self._transfers.deferred = progress == "block" and not self.transport.recordable

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays alive now, by buffer."""
        return self._arrays

    @arrays.setter
    def arrays(self, arrays: Mapping[str, Array]) -> None:
        held = dict(arrays)
        self._arrays.clear()
        self._arrays.update(held)

    def begin(self, feeds: Mapping[str, Array]) -> None:
        """Make ready for one run: ``feeds`` holds this rank's block, on the host, for every buffer of ``program.feeds``."""
        moved = {
            id(a): self._fed(a, self.program.feeds.get(b)) for b, a in feeds.items()
        }  # buffers may share one block
        self.arrays = {**self.state, **{b: moved[id(a)] for b, a in feeds.items()}}
        if self._recorded is not None:
            self.micro_batch = self._recorded.begin(self.micro_batch)
        self._pending.clear()
        self._fetched.clear()
        self._timed.append([])
        self._transfers.forget()
        self._buckets.forget()

    def _fed(self, a: Array, source: str | None) -> Array:
        """A block of samples in the type of activations, a block of targets as it is."""
        if source in self._targets and a.dtype.kind != "f" and not self.engine.host:
            a = np.asarray(a, np.int64)  # what kernels on devices read; those on the host widen as they go
        array, kind = self.engine.from_host(a), self.engine.activations
        return (
            array
            if source in self._targets or a.dtype.kind != "f" or a.dtype == kind
            else self.engine.copy(array, kind)
        )

    def execute(self, index: int) -> None:
        """Execute one step. Ranks in one process take turns step by step; a rank of its own runs all."""
        run = self._runs[index]
        if run is None:
            return
        kind, calls = run
        start = self.engine.mark()
        for call in calls:
            call()
        end = self.engine.mark()
        self._timed[-1].append((kind, start, end))
        if self.tracer is not None:
            self._trace(self.tracer, self.program.steps[index], kind, start, end)

    def _trace(self, tracer: Tracer, step: Step, kind: str, start: Any, end: Any) -> None:
        label = self.label
        match step:
            case Compute():
                tracer.step(f"{step.node} {step.kernel.name}{label}", step.phase, start, end, micro_batch(step))
            case Start():
                tracer.step(f"start {step.dst}{label}", kind, start, end)
                tracer.open(f"{step.dst}{label}", kind, start)
            case StartMany():
                tracer.step(f"start {step.tag}{label}", kind, start, end)
                for s in step.starts:
                    tracer.open(f"{s.dst}{label}", kind, start)
            case Wait():
                tracer.step(f"wait {step.dst}{label}", kind, start, end)
                tracer.close(f"{step.dst}{label}", end)
            case Sum() | Accumulate() | Update():
                tracer.step(f"{kind}{label}", step.phase, start, end, micro_batch(step))

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the whole program; returns its results. Collective over all ranks."""
        self.begin(feeds)
        for age in range(len(self.program.rounds)):
            self.go(age)
        return self.results()

    def go(self, age: int) -> None:
        """Run one of the program's rounds, behind `begin` and those before it."""
        steps, running = self.program.rounds[age], self.engine.running
        with running(), Background(self._transfers.advance, running) if self.progress == "thread" else nullcontext():
            if self.tracer is None:
                recorded = self._recorded is not None and self._recorded.ready
                self._run(self._recorded.stretches() if self._recorded and recorded else self._stretches[age])
            else:
                for i in steps:
                    self.execute(i)
            if steps.stop < len(self._runs):
                return
            self._transfers.settle()
        self._add_up(1)  # of this run much may still be under way
        if not self._ran:  # kernels of these shapes have been timed, where they are
            self._ran = True
            self.engine.agree(self.transport.allgather_obj)

    def _run(self, stretches: Sequence[tuple[str, list[Callable[[], None]]]]) -> None:
        timed, mark = self._timed[-1], self.engine.mark
        start = mark()
        for kind, calls in stretches:
            for call in calls:
                call()
            end = mark()
            timed.append((kind, start, end))
            start = end

    def spent(self) -> dict[str, float]:
        """Seconds per kind of step ("compute", "update", and each kind of move) since the last call."""
        self._add_up(0)
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _add_up(self, but: int) -> None:
        """Add the times of all but the newest runs to the seconds per kind."""
        seconds, elapsed = self._seconds, self.engine.elapsed
        while len(self._timed) > but:
            for kind, start, end in self._timed.pop(0):
                seconds[kind] = seconds.get(kind, 0.0) + elapsed(start, end)

    def _join(self, steps: Iterable[int]) -> list[tuple[str, list[Callable[[], None]]]]:
        """Steps of one kind in a row, timed together. Freeing counts as what it follows."""
        out: list[tuple[str, list[Callable[[], None]]]] = []
        for step, run in ((self.program.steps[i], self._runs[i]) for i in steps):
            if run is None:
                continue
            kind, calls = run
            if not out or (out[-1][0] != kind and not isinstance(step, Free)):
                out.append((kind, []))
            out[-1][1].extend(calls)
        return out

    def results(self) -> dict[str, Array]:
        """Arrays of ``program.results``; call it when all steps have run."""
        self._transfers.settle()
        return {k: self._array(b) for k, b in self.program.results.items()}

    def value(self, result: str) -> np.ndarray:
        """One of ``program.results`` on the host; for those of `SMALL` waits for what made it alone."""
        fetch = self._fetched.get(result) or self.engine.fetch(self._array(self.program.results[result]))
        value: np.ndarray = fetch()
        return value

    def _prepare(self, step: Step) -> Run:
        """The kind under which a step's time is kept, what it does, and what follows: small results start for the host where they are made."""
        kind, call = self._bind(step)
        written = step.writes if isinstance(step, Compute) else (step.dst,) if isinstance(step, Wait | Sum) else ()
        results = [
            (name, b) for name, b in self.program.results.items() if b in written and name.partition("/")[0] in SMALL
        ]
        if not results:
            return kind, (call,)

        def fetch() -> None:
            for name, buffer in results:
                self._fetched[name] = self.engine.fetch(self._arrays[buffer])

        return kind, (call, fetch)

    def _bind(self, step: Step) -> tuple[str, Callable[[], None]]:
        match step:
            case Compute():
                return "compute", self._compute(step, bind(Bound.of(step, self.program, self.transport.rank)))
            case Start():
                return step.move.kind, lambda: self._start(step)
            case StartMany():
                return "allreduce", lambda: self._start_many(step)
            case Wait():
                return self._kinds[step.dst], lambda: self._wait(step)
            case Sum():
                return "compute", lambda: self._sum(step)
            case Free():
                return "compute", self._free(step)
            case Accumulate():
                return "compute", lambda: self._accumulate(step)
            case Update():
                return "update", lambda: self._update(step)

    def _compute(self, step: Compute, call: Call) -> Callable[[], None]:
        """What runs a kernel. Python's share of a step is mostly spent here, so all that can be is looked up before."""
        arrays, engine, reads, writes = self._arrays, self.engine, step.reads, step.writes
        advance = self._transfers.advance
        if step.kernel.name in PLACED and writes[0] in self._buckets:
            plain, place = call, self._buckets.place

            def call(engine: Engine, micro_batch: MicroBatch, *arrays: Array) -> tuple[Array, ...]:
                return plain(engine, micro_batch, *arrays, out=place(writes[0]))

        def run() -> None:
            out = call(engine, self.micro_batch, *[arrays[b] for b in reads])
            for name, array in zip(writes, out):  # noqa: B905
                arrays[name] = array
            if self.progress == "test":
                advance()

        return run

    def _start(self, step: Start) -> None:
        array = self._array(step.src)
        if step.move.dst.holds(self.transport.rank):
            self._pending[step.dst] = self._transfers.start(step.move, array, step.donate, step.dst)
        else:
            self._transfers.send(step.move, array, step.dst)

    def _array(self, buffer: str, dtype: Any = None) -> Array:
        """An array of the program; of one that is elsewhere, this rank's empty block."""
        held = self._arrays.get(buffer)
        if held is not None:
            return held
        info, rank = self.program.buffers[buffer], self.transport.rank
        assert not info.layout.holds(rank), buffer
        own = self.engine.dtype if of_parameters(buffer) else self.engine.activations
        return self.engine.empty(info.layout.local_shape(rank), dtype or info.dtype or own)

    def _start_many(self, step: StartMany) -> None:
        shapes = [self._arrays[s.src].shape for s in step.starts]
        flat = self._buckets.take(step, self._arrays)
        finishes = self._transfers.allreduce_many(step.starts[0].move, flat, shapes, step.tag)
        for start, finish in zip(step.starts, finishes, strict=True):
            self._pending[start.dst] = finish

    def _wait(self, step: Wait) -> None:
        finish = self._pending.pop(step.dst)
        self.arrays[step.dst] = finish()

    def _sum(self, step: Sum) -> None:
        arrays, total = [self._arrays[s] for s in step.srcs], None
        for weight, array in zip(step.weights, arrays, strict=False):
            total = self.engine.axpy(weight, array, total)
        self._arrays[step.dst] = self.engine.add(arrays) if total is None else total

    def _free(self, step: Free) -> Callable[[], None]:
        pop, names = self._arrays.pop, step.buffers
        if len(names) == 1:
            (name,) = names
            return lambda: pop(name, None)

        def run() -> None:
            for name in names:
                pop(name, None)

        return run

    def _accumulate(self, step: Accumulate) -> None:
        weight = self.micro_batch.weight * step.weight
        part = self.engine.axpy(weight, self.arrays[step.grad], self._accumulated.pop(step.param, None))
        if step.last:
            self.arrays[step.grad] = part
        else:
            self._accumulated[step.param] = part

    def _update(self, step: Update) -> None:
        params = {p: self.state[p] for p in step.params}
        if self.before_update is not None:
            self.before_update(params)
        if self.on_update is not None:
            grads = {p: self._array(g, self.engine.dtype) for p, g in zip(step.params, step.grads, strict=True)}
            self.on_update(params, grads)


def run_lockstep(executors: Sequence[Executor], feeds: Iterable[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Run the same program on several ranks inside one process, step by step."""
    for e, f in zip(executors, feeds, strict=True):
        e.begin(f)
    for i in range(len(executors[0].program.steps)):
        for e in executors:
            e.execute(i)
    return [e.results() for e in executors]
