"""Moves of one rank's arrays: what starting, deferring and finishing them does. (Their values: tests/layout.)"""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Dim, Layout
from lbpar.layout.transition import Move, transition
from lbpar.runtime.transfers import Transfers
from lbpar.transport.virtual import VirtualTransport, VirtualWorld

GRID = Grid((2,))
WHOLE = Layout(GRID, (Dim.whole(6),))
PARTIAL = Layout(GRID, WHOLE.dims, (0,))
ROWS = Layout(GRID, (Dim(6, (6,), ((0,),)),))


def move(source: Layout, target: Layout) -> Move:
    (found,) = transition(source, target)
    return found


@pytest.mark.parametrize("donate", [False, True])
def test_an_allreduce_leaves_what_is_not_donated(donate: bool) -> None:
    world = VirtualWorld(GRID)
    transports = [world.transport(r) for r in range(2)]
    blocks = [np.arange(6.0) + 10 * r for r in range(2)]
    finishes = []
    for transport, block in zip(transports, blocks, strict=True):
        transfers = Transfers(NumpyEngine(np.float64), transport)
        transfers.deferred = False
        finishes.append(transfers.start(move(PARTIAL, WHOLE), block, donate, "sum"))
    for finish in finishes:
        np.testing.assert_array_equal(finish(), 2 * np.arange(6.0) + 10)
    if not donate:
        np.testing.assert_array_equal(blocks[1], np.arange(6.0) + 10)


def test_a_deferred_allreduce_is_made_once_where_it_is_waited_for() -> None:
    def rank(transport: VirtualTransport) -> list[np.ndarray]:
        transfers = Transfers(NumpyEngine(np.float64), transport)
        transfers.deferred = True
        flat = np.arange(10.0) * (1 + transport.rank)
        parts = transfers.allreduce_many(move(PARTIAL, WHOLE), flat, [(2, 3), (4,)], "many")
        return [finish() for finish in (*reversed(parts), *parts)]

    for results in VirtualWorld(GRID).run(rank):
        last, first, again, _ = results
        np.testing.assert_array_equal(first, 3 * np.arange(6.0).reshape(2, 3))
        np.testing.assert_array_equal(last, 3 * np.arange(6.0, 10.0))
        assert np.shares_memory(first, again)  # one message


def test_what_stays_is_neither_copied_nor_sent() -> None:
    transport = VirtualWorld(GRID).transport(1)
    transfers = Transfers(NumpyEngine(np.float64), transport)
    array = np.arange(6.0)
    np.testing.assert_array_equal(transfers.start(move(WHOLE, ROWS), array, False, "cut")(), array[3:])
    transfers.advance()  # nothing is under way
