"""Steps that a device records once and then launches in one go (CUDA graphs), where nothing of the host is in them.

What is recorded reads and writes the same memory each time. So samples are copied to where those of the first time were, and keys of
dropout lie on the device. Between what is recorded, and not in it, are the copies of losses to the host, and updates, whose
learning rates and numbers of steps change. What a run leaves lasts until the next run of any recorded program.

Moves are recorded where the transport is `recordable`. What is recorded together is a whole of its own: moves that were started before it
have ended, as far as the device's queue is concerned, and those that it starts end in it, whoever waits for them later. All ranks record and
launch alike, for what is recorded follows from the program; a rank that cannot record tells the others, and none does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from lbpar.engine.base import Engine
from lbpar.errors import LbparError
from lbpar.program.steps import (
    Accumulate,
    Compute,
    Free,
    Program,
    Start,
    StartMany,
    Step,
    Update,
    Wait,
    reads,
    writes,
)
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.transfers import Finish
from lbpar.transport.base import Counter, Transport

log = logging.getLogger(__name__)

Array = Any
Run = tuple[str, Sequence[Callable[[], None]]]
"""Of a step: the kind under which its time is kept, what it does, and what follows for the host."""

BEFORE = 2
"""Runs before the one that records: kernels are compiled, timed and chosen, small arrays uploaded, and ranks connected in them."""


@dataclass
class _Stretch:
    """Steps in a row that are recorded together, and the buffers of theirs that others want."""

    calls: list[Callable[[], None]] = field(default_factory=list)
    keeps: set[str] = field(default_factory=set)
    launches: bool = False
    launch: Callable[[], None] | None = None
    sent: Counter = field(default_factory=Counter)
    held: dict[str, Array] = field(default_factory=dict)

    def parts(self) -> Iterator[tuple[str, _Stretch | Callable[[], None]]]:
        """Itself, or its calls where these launch nothing."""
        if self.launches:
            yield "compute", self
        else:
            yield from (("compute", call) for call in self.calls)


class Recorded:
    """A program's steps on one rank, of which most are recorded.

    Parameters
    ----------
    program : Program
        Of which every rank takes part in every step.
    engine : Engine
        One that `captures`.
    transport : Transport
        One that is `recordable`, or of a single rank.
    arrays, pending : dict of array, dict of callable
        Those alive, and what finishes the moves under way, by buffer; the calls of ``runs`` read and write both.
    runs : sequence
        Per step: what it does, with its kind.

    Attributes
    ----------
    launches : int
        How often a recorded stretch was launched.
    """

    def __init__(
        self,
        program: Program,
        engine: Engine,
        transport: Transport,
        arrays: dict[str, Array],
        pending: dict[str, Finish],
        runs: Sequence[Run],
    ) -> None:
        self._program, self._engine, self._transport = program, engine, transport
        self._arrays, self._pending, self._runs = arrays, pending, runs
        self._began, self.launches, self._refused = 0, 0, False
        self._fed: dict[str, Array] = {}
        self._state: dict[str, Array] = {}
        self._scale: float | None = None
        self._stretches: list[tuple[str, _Stretch | Callable[[], None]]] = []
        self._dropped = [s.node for s in program.steps if isinstance(s, Compute) and s.kernel.name == "dropout"]
        self._keys = engine.empty((len(self._dropped),), np.uint64)

    @property
    def ready(self) -> bool:
        """Whether this run is one that is recorded, or was."""
        return self._began > BEFORE and not self._refused

    def begin(self, micro_batch: MicroBatch) -> MicroBatch:
        """Let a run begin whose feeds and state are among the arrays; gives the micro-batch with its keys on the device."""
        self._began += 1
        if not self.ready:
            return micro_batch
        arrays, copied = self._arrays, dict[int, Array]()
        for name in self._program.feeds:
            there, a = self._fed.get(name), arrays[name]
            if id(a) in copied:  # buffers may share one block
                arrays[name] = copied[id(a)]
            elif there is None or there is a:
                copied[id(a)] = a
            else:
                arrays[name] = copied[id(a)] = self._engine.copy(a, out=there)
        for name in self._program.feeds:
            self._fed[name] = arrays[name]
        state = {name: arrays[name] for name in self._program.params}
        same = all(self._state.get(name) is a for name, a in state.items())
        if not same or self._scale != micro_batch.loss_scale:
            self._state, self._scale, self._stretches = state, micro_batch.loss_scale, list(self._cut())
        if not self._dropped:
            return micro_batch
        keys = np.array([micro_batch.key(node) for node in self._dropped], np.uint64)
        self._engine.copy(self._engine.from_host(keys), out=self._keys)
        return replace(micro_batch, keys={n: self._keys[i : i + 1] for i, n in enumerate(self._dropped)})

    def stretches(self) -> list[tuple[str, list[Callable[[], None]]]]:
        """What the run does, by kinds: recorded stretches and what lies between them."""
        found: list[tuple[str, list[Callable[[], None]]]] = []
        for kind, what in self._stretches:
            call = partial(self._run, what) if isinstance(what, _Stretch) else what
            if found and found[-1][0] == kind:
                found[-1][1].append(call)
            else:
                found.append((kind, [call]))
        return found

    def _cut(self) -> Iterator[tuple[str, _Stretch | Callable[[], None]]]:
        """Stretches to record, between what is run as it is."""
        loose, wanted, recorded = set[str](), set(self._program.results.values()), list[bool]()
        for step in self._program.steps:  # what reads memory that differs from run to run is not recorded
            recorded.append(not isinstance(step, Accumulate | Update) and loose.isdisjoint(_needs(step)))
            if not recorded[-1]:
                loose.update(_gives(step))
                wanted.update(reads(step))
        stretch, then = _Stretch(), list[tuple[str, Callable[[], None]]]()
        for step, (kind, (call, *after)), mine in zip(self._program.steps, self._runs, recorded, strict=True):
            # What follows for the host may wait for steps that launch next to nothing, for which no graph is worth its launch.
            if not mine or (then and not isinstance(step, Wait | Free)):
                yield from stretch.parts()
                yield from then
                stretch, then = _Stretch(), []
            if mine:
                stretch.calls.append(call)
                stretch.launches |= not isinstance(step, Free)
                stretch.keeps.update(wanted.intersection(writes(step)))
            else:
                yield kind, call
            then += [(kind, more) for more in after]
        yield from stretch.parts()
        yield from then

    def _run(self, stretch: _Stretch) -> None:
        if stretch.launch is None and not self._refused:
            before = dict(self._arrays), dict(self._pending)  # held until all this is queued
            if not self._record(stretch):
                self._refused = True
                for now, then in zip((self._arrays, self._pending), before, strict=True):
                    now.clear()
                    now.update(then)
        if stretch.launch is None:
            return _call(stretch.calls)
        self._arrays.update(stretch.held)
        if stretch.sent.items():  # moves under way would be beside those of the graph, in another order on other ranks
            self._transport.join()
            self._transport.counter.include(stretch.sent)
        self.launches += 1
        stretch.launch()

    def _record(self, stretch: _Stretch) -> bool:
        """Record a stretch, on all ranks or on none. Collective over all ranks."""
        failed, transport = "", self._transport
        transport.join()
        try:
            with transport.counter.aside() as stretch.sent:
                stretch.launch = self._engine.capture(lambda: _call([*stretch.calls, transport.join]))
        except LbparError as error:
            failed = str(error)
        told = transport.allgather_obj(failed)
        found = [f"rank {rank}: {why}" if transport.size > 1 else why for rank, why in enumerate(told) if why]
        if found:
            stretch.launch = None
            if transport.rank == 0:
                log.warning("engine.graphs: steps are not recorded: %s", found[0])
        else:
            stretch.held = {name: self._arrays[name] for name in stretch.keeps if name in self._arrays}
        return not found


def _needs(step: Step) -> tuple[str, ...]:
    """What a step reads; a wait, what is moved."""
    return (step.dst,) if isinstance(step, Wait) else reads(step)


def _gives(step: Step) -> tuple[str, ...]:
    """What a step writes; a start, what waits will make available."""
    if isinstance(step, StartMany):
        return tuple(s.dst for s in step.starts)
    return (step.dst,) if isinstance(step, Start) else writes(step)


def _call(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()
