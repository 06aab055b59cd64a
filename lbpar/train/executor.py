"""Run a program on one rank, with an engine and a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lbpar.engine.base import Engine
from lbpar.program.steps import Compute, Free, Program, Start, Step, Sum, Update, Wait
from lbpar.train.kernels import Bound, Call, Context, bind
from lbpar.train.transfers import Finish, Transfers
from lbpar.transport.base import Transport

Array = Any
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
    """

    def __init__(self, program: Program, engine: Engine, transport: Transport, state: dict[str, Array]) -> None:
        self.program, self.engine, self.transport, self.state = program, engine, transport, state
        self.context = Context()
        self.on_update: UpdateRule | None = None
        self.arrays: dict[str, Array] = {}
        self._pending: dict[str, Finish] = {}
        self._transfers = Transfers(engine, transport)
        self._calls: dict[int, Call] = {}
        for i, step in enumerate(program.steps):
            if isinstance(step, Compute):
                self._calls[i] = bind(Bound.of(step, program, transport.rank))

    def begin(self, feeds: Mapping[str, Array]) -> None:
        """Make ready for one run: ``feeds`` holds this rank's block for every buffer of ``program.feeds``."""
        self.arrays = {**self.state, **feeds}
        self._pending.clear()

    def execute(self, index: int) -> None:
        """Execute one step. Ranks in one process take turns step by step; a rank of its own runs all."""
        step = self.program.steps[index]
        arrays = self.arrays
        if isinstance(step, Compute):
            out = self._calls[index](self.engine, self.context, *[arrays[b] for b in step.reads])
            for name, array in zip(step.writes, out, strict=True):
                arrays[name] = array
        elif isinstance(step, Start):
            self._pending[step.dst] = self._transfers.start(step.move, arrays[step.src], step.donate, tag(step))
        elif isinstance(step, Wait):
            arrays[step.dst] = self._pending.pop(step.dst)()
        elif isinstance(step, Sum):
            arrays[step.dst] = self.engine.add([arrays[s] for s in step.srcs])
        elif isinstance(step, Free):
            for name in step.buffers:
                arrays.pop(name, None)
        elif isinstance(step, Update) and self.on_update is not None:
            grads = {p: arrays[g] for p, g in zip(step.params, step.grads, strict=True)}
            self.on_update({p: self.state[p] for p in step.params}, grads)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the whole program; returns its results. Collective over all ranks."""
        self.begin(feeds)
        for i in range(len(self.program.steps)):
            self.execute(i)
        return self.results()

    def results(self) -> dict[str, Array]:
        """Arrays of ``program.results``."""
        return {k: self.arrays[b] for k, b in self.program.results.items()}


def tag(step: Start) -> str:
    """Name under which a transport counts a move."""
    return step.dst


def run_lockstep(executors: Sequence[Executor], feeds: Iterable[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Run the same program on several ranks inside one process, step by step."""
    for e, f in zip(executors, feeds, strict=True):
        e.begin(f)
    steps: Sequence[Step] = executors[0].program.steps
    for i in range(len(steps)):
        for e in executors:
            e.execute(i)
    return [e.results() for e in executors]
