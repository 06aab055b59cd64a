"""Timelines: what each rank did when, as JSON that Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any, Self

from lbpar.engine.base import Engine
from lbpar.errors import CheckpointError
from lbpar.layout.exchange import many_volume, volume
from lbpar.program.steps import Program, Start, StartMany
from lbpar.program.words import itemsize
from lbpar.transport.base import Sent, Transport
from lbpar.whole_file import beside

LIMIT = 50_000
"""Events kept per rank: the first steps of a long run tell enough."""
SETTLED = 4
"""Steps before the one that is looked at: the first ones also make buffers and load code."""
SHOWN = 16
"""Ranks whose events of that step are kept."""

ROWS = ("kernels and waits", "moves under way", "steps")
COMPUTE, MOVES, STEPS = range(3)
Bytes = dict[str, int]
Event = tuple[str, str, Any, Any, int, int | None]
"""Name, kind, start, end, row, micro-batch."""


class Tracer:
    """Collects one rank's events; times are shared by all ranks of a node's clock.

    Kernels and waits are on the first row of a rank, moves under way (from start to the end of the wait) on the second, steps on the
    third; moves that overlap get further rows, for events of one row have to nest. Times are marks of the engine, which are read when the files are
    written.

    Parameters
    ----------
    transport : Transport
    engine : Engine
    whole : bool
        Trace all steps, for ``trace.json``.
    look : bool
        Trace one step, for ``step.json``: the one after the first ``settled``, or the last.
    last : int
        Number of the last step.
    settled : int
        Steps before the one that is looked at.
    """

    def __init__(
        self,
        transport: Transport,
        engine: Engine,
        whole: bool = True,
        look: bool = False,
        last: int = 1,
        settled: int = SETTLED,
    ) -> None:
        self.rank, self.whole, self._engine = transport.rank, whole, engine
        self._counter, self._look, self._last, self._settled = transport.counter, look, last, settled
        self._events: list[Event] = []
        self._open: dict[str, tuple[str, Any]] = {}
        self._steps: list[tuple[int, int, Any, Any]] = []  # epoch, number, start and end of each traced batch
        self._chosen: int | None = None
        self._seen: list[Event] = []  # events of the chosen step
        self._counted, self._model = Bytes(), Bytes()
        engine.synchronize()
        self._began, self._origin = time(), engine.mark()

    @contextmanager
    def batch(self, program: Program, epoch: int, step: int) -> Iterator[Self | None]:
        """In this block a batch of a step runs, for which the executor is given what is yielded."""
        if self._chosen is None and self._look:
            self._chosen = min(step + self._settled, self._last)
        here = step == self._chosen
        if not self.whole and not here:
            yield None
            return
        first, before, start = len(self._events), self._counter.items(), self._engine.mark()
        yield self
        self._steps.append((epoch, step, start, self._engine.mark()))
        if here:
            self._seen += self._events[first:]
            self._count(program, before)

    def _count(self, program: Program, before: Mapping[tuple[str, str], Sent]) -> None:
        """Add what the transport sent since ``before`` to the books, beside what the program says."""
        moves = {tag: (kind, size) for tag, kind, size in sends(program, self.rank, self._engine)}
        for kind, size in moves.values():
            self._model[kind] = self._model.get(kind, 0) + size
        for key, sent in self._counter.items().items():
            kind = (
                moves[key[1]][0] if key[1] in moves else key[1]
            )  # what is no move of the program goes by its own name
            if size := sent.bytes - before.get(key, Sent()).bytes:
                self._counted[kind] = self._counted.get(kind, 0) + size

    def step(self, name: str, kind: str, start: Any, end: Any, micro: int | None = None) -> None:
        """A step of the program that ran from ``start`` to ``end``, for a micro-batch if there are several."""
        self._add(name, kind, start, end, COMPUTE, micro)

    def open(self, dst: str, kind: str, start: Any) -> None:
        """A move towards ``dst`` is under way."""
        self._open[dst] = (kind, start)

    def close(self, dst: str, end: Any) -> None:
        """It has arrived; what started before the tracer looked is left out."""
        if dst in self._open:
            kind, start = self._open.pop(dst)
            self._add(dst, kind, start, end, MOVES)

    def _add(self, name: str, kind: str, start: Any, end: Any, row: int, micro: int | None = None) -> None:
        if len(self._events) < LIMIT:
            self._events.append((name, kind, start, end, row, micro))

    def _event(self, name: str, kind: str, start: Any, end: Any, row: int, micro: int | None = None) -> dict[str, Any]:
        lasts, at = self._engine.elapsed(start, end) * 1e6, self._at(start)
        event = {"name": name, "cat": kind, "ph": "X", "ts": at, "dur": lasts, "pid": self.rank, "tid": row}
        return event if micro is None else event | {"args": {"micro": micro}}

    def _at(self, mark: Any) -> float:
        return (self._began + self._engine.elapsed(self._origin, mark)) * 1e6

    def _marks(self, only: int | None = None) -> Iterator[dict[str, Any]]:
        """An event for each step, and one where an epoch begins."""
        begun = None
        for epoch, step, start, end in self._steps[:LIMIT]:
            if only not in (None, step):
                continue
            if epoch != begun:
                yield {
                    "name": f"epoch {epoch}",
                    "cat": "epoch",
                    "ph": "i",
                    "s": "p",
                    "ts": self._at(start),
                    "pid": self.rank,
                    "tid": STEPS,
                }
                begun = epoch
            yield self._event(f"step {step}", "step", start, end, STEPS) | {"args": {"epoch": epoch, "step": step}}

    def write(self, out: Path, transport: Transport) -> None:
        """Write all ranks' events to ``trace.json`` and ``step.json`` on rank 0. Collective over all ranks.

        Raises
        ------
        CheckpointError
            A file cannot be written.
        """
        whole = transport.gather([*self._marks(), *(self._event(*e) for e in self._events)] if self.whole else [])
        seen = self._seen if self.rank < SHOWN else []
        look = [*self._marks(self._chosen), *(self._event(*e) for e in seen)] if self._chosen and seen else []
        step = transport.gather((look, {"counted": self._counted, "model": self._model}))
        if whole is None or step is None:
            return
        if self.whole:
            _write(out / "trace.json", whole, {})
        if any(events for events, _ in step):
            facts = {"step": self._chosen, "bytes": [sizes for _, sizes in step]}
            _write(out / "step.json", [events for events, _ in step[:SHOWN]], facts)


def spread(events: list[dict[str, Any]]) -> int:
    """Give moves of one rank that overlap rows of their own, from ``len(ROWS)`` on; how many rows more these take."""
    ends: list[float] = []  # of the last move in each row
    for e in sorted((e for e in events if e["ph"] == "X" and e["tid"] == MOVES), key=lambda e: e["ts"]):
        lane = next((i for i, end in enumerate(ends) if end <= e["ts"]), len(ends))
        ends[lane : lane + 1] = [e["ts"] + e["dur"]]
        if lane:
            e["tid"] = len(ROWS) - 1 + lane
    return max(0, len(ends) - 1)


def sends(program: Program, rank: int, engine: Engine) -> Iterator[tuple[str, str, int]]:
    """Every message of a program: its name in a transport's books, the kind of move, and the bytes that a rank sends."""
    for step in program.steps:
        if isinstance(step, (Start, StartMany)):
            first = step.starts[0] if isinstance(step, StartMany) else step
            if first.move.kind == "slice":
                continue
            sent = (
                volume(step.move, rank) if isinstance(step, Start) else many_volume([s.move for s in step.starts], rank)
            )
            name = step.dst if isinstance(step, Start) else step.tag
            yield name, first.move.kind, sent.elements * itemsize(program, first, engine.dtype, engine.activations)


def _write(path: Path, everyone: list[list[dict[str, Any]]], facts: dict[str, Any]) -> None:
    """Write the events of all ranks to one file."""
    names: list[dict[str, Any]] = []
    for rank in range(len(everyone)):
        names.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        more = spread(everyone[rank])
        for row, text in enumerate((*ROWS, *[ROWS[MOVES]] * more)):
            names.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": text}})
    content = {
        "traceEvents": names + [e for events in everyone for e in events],
        "displayTimeUnit": "ms",
        "otherData": facts,
    }
    with beside(path, lambda reason: CheckpointError(f"run.trace: {path} cannot be written: {reason}.")) as part:
        part.write_text(json.dumps(content), encoding="utf-8")
