"""Timelines: what each rank did when, as JSON that Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from pathlib import Path
from time import time
from typing import Any

from lbpar.engine.base import Engine
from lbpar.errors import CheckpointError
from lbpar.transport.base import Transport

LIMIT = 50_000
"""Events kept per rank: the first steps of a long run tell enough."""

COMPUTE, MOVES = 0, 1


class Tracer:
    """Collects one rank's events; times are shared by all ranks of a node's clock.

    Kernels and waits are on the first row of a rank, moves under way (from start to the end of the wait) on the second.
    Times are marks of the engine, which are read when the file is written.
    """

    def __init__(self, rank: int, engine: Engine) -> None:
        self.rank, self._engine = rank, engine
        self._events: list[tuple[str, str, Any, Any, int]] = []
        self._open: dict[str, tuple[str, Any]] = {}
        engine.synchronize()
        self._began, self._origin = time(), engine.mark()

    def step(self, name: str, kind: str, start: Any, end: Any) -> None:
        """A step that ran from ``start`` to ``end``."""
        self._add(name, kind, start, end, COMPUTE)

    def open(self, dst: str, kind: str, start: Any) -> None:
        """A move towards ``dst`` is under way."""
        self._open[dst] = (kind, start)

    def close(self, dst: str, end: Any) -> None:
        """It has arrived."""
        kind, start = self._open.pop(dst)
        self._add(dst, kind, start, end, MOVES)

    def _add(self, name: str, kind: str, start: Any, end: Any, row: int) -> None:
        if len(self._events) < LIMIT:
            self._events.append((name, kind, start, end, row))

    def _event(self, name: str, kind: str, start: Any, end: Any, row: int) -> dict[str, Any]:
        at = (self._began + self._engine.elapsed(self._origin, start)) * 1e6
        lasts = self._engine.elapsed(start, end) * 1e6
        return {"name": name, "cat": kind, "ph": "X", "ts": at, "dur": lasts, "pid": self.rank, "tid": row}

    def write(self, path: Path, transport: Transport) -> None:
        """Write all ranks' events to one file on rank 0. Collective over all ranks.

        Raises
        ------
        CheckpointError
            The file cannot be written.
        """
        everyone = transport.gather([self._event(*e) for e in self._events])
        if everyone is None:
            return
        rows = ("kernels and waits", "moves under way")
        names: list[dict[str, Any]] = []
        for rank in range(len(everyone)):
            names.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
            for row, text in enumerate(rows):
                names.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": text}})
        content = {"traceEvents": names + [e for events in everyone for e in events], "displayTimeUnit": "ms"}
        try:
            path.write_text(json.dumps(content), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"run.trace: {path} cannot be written: {error.strerror or error}.") from None
