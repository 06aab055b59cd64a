"""Compare what a transport counted with what the program says of its steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from lbpar.layout.exchange import many_volume, volume
from lbpar.program.steps import Start, StartMany
from lbpar.transport.base import Sent
from tests.util.run import Run, nbytes

#: Name of each move in the transport's books.
CALLS = {"halo": "exchange", "p2p": "exchange", "accumulate": "exchange"}


def assert_counted(run: Run, steps: int = 1, dtype: Any = np.float64) -> None:
    """Every step of every rank sent what ``volume`` says, and nothing else was sent."""
    for rank, e in enumerate(run.executors):
        books = e.transport.counter.items()
        total = Sent()
        for step in run.program.steps:
            if not isinstance(step, (Start, StartMany)):
                continue
            first = step.starts[0] if isinstance(step, StartMany) else step
            said = (
                many_volume([s.move for s in step.starts], rank)
                if isinstance(step, StartMany)
                else volume(step.move, rank)
            )
            size = nbytes(run.program.buffers[first.src], said.elements, dtype)
            tag = step.tag if isinstance(step, StartMany) else step.dst
            sent = books.pop((CALLS.get(first.move.kind, first.move.kind), tag), Sent())
            assert (sent.messages, sent.bytes) == (steps * said.messages, steps * size), (rank, str(first.move), said)
            total += sent
        assert not any(s.messages for s in books.values()), f"rank {rank} sent more than its program says: {books}"
        assert e.transport.counter.total() == total
