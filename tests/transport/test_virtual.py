from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbpar.errors import CommError
from lbpar.layout.grid import Grid
from lbpar.transport.base import Sent
from lbpar.transport.calls import Call
from lbpar.transport.virtual import VirtualTransport, VirtualWorld

GRIDS = [Grid(), Grid((2,)), Grid((3,)), Grid((2, 3)), Grid((2, 1, 2, 2)), Grid.of(12)]


def data(rank: int, n: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(n)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_allreduce_in_lockstep(grid: Grid, op: Any) -> None:
    world = VirtualWorld(grid)
    for axes in [(), grid.axes, grid.axes[:1], grid.axes[1:]]:
        requests = [t.allreduce(data(t.rank, 7), axes, op) for t in world.transports]
        for t, r in zip(world.transports, requests, strict=True):
            parts = [data(m, 7) for m in grid.group(axes, t.rank)]
            want = parts[0]
            for p in parts[1:]:  # in rank order, bit for bit
                want = want + p if op == "sum" else np.maximum(want, p)
            np.testing.assert_array_equal(r.wait(), want)
    world.check_idle()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_reduce_scatter_allgather_alltoall(grid: Grid) -> None:
    world = VirtualWorld(grid)
    axes = grid.axes
    p = grid.size
    counts = [(3 * i + 2) % 4 for i in range(p)]
    total, start = sum(counts), np.cumsum([0, *counts])
    summed = sum(data(r, total) for r in range(p))

    def program(t: VirtualTransport) -> tuple[np.ndarray, ...]:
        piece = t.reduce_scatter(data(t.rank, total), counts, axes).wait()
        whole = t.allgather(piece, counts, axes).wait()
        send, recv = [counts[t.rank]] * p, counts
        swapped = t.alltoall(np.repeat(t.rank * 100.0 + np.arange(p), counts[t.rank]), send, recv, axes).wait()
        return piece, whole, swapped

    for r, (piece, whole, swapped) in enumerate(world.run(program)):
        np.testing.assert_allclose(piece, summed[start[r] : start[r + 1]], rtol=1e-14)
        np.testing.assert_allclose(whole, summed, rtol=1e-14)
        np.testing.assert_array_equal(swapped, np.repeat(np.arange(p) * 100.0 + r, counts))
    world.check_idle()


def test_exchange_keeps_concurrent_messages_apart() -> None:
    world = VirtualWorld(Grid((4,)))
    started = []
    for t in world.transports:
        right, left = (t.rank + 1) % 4, (t.rank - 1) % 4
        a = t.exchange({right: np.full(2, t.rank)}, {left: 2}, np.int64, (0,), tag="a")
        b = t.exchange({right: np.full(3, 10 + t.rank), t.rank: np.ones(1, int)}, {left: 3, t.rank: 1}, int, (0,))
        started.append((a, b))
    for rank, (a, b) in enumerate(started):
        left = (rank - 1) % 4
        assert b.wait()[left].tolist() == [10 + left] * 3
        assert b.wait()[rank].tolist() == [1]
        assert a.wait()[left].tolist() == [left] * 2


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_counted_pieces_equal_the_formulas(draw: Any) -> None:
    """The convention as formulas (used by MPI and by the cost model) against the pieces that were copied."""
    p = draw.draw(st.sampled_from([2, 3, 4, 6]))
    n = draw.draw(st.integers(0, 13))
    counts = draw.draw(st.lists(st.integers(0, 4), min_size=p, max_size=p))
    table = [draw.draw(st.lists(st.integers(0, 3), min_size=p, max_size=p)) for _ in range(p)]
    world = VirtualWorld(Grid((p,)))

    def program(t: VirtualTransport) -> None:
        me = t.rank
        t.allreduce(np.ones(n), (0,)).wait()
        t.reduce_scatter(np.ones(sum(counts), "float32"), counts, (0,)).wait()
        t.allgather(np.ones(counts[me]), counts, (0,)).wait()
        t.alltoall(np.ones(sum(table[me])), table[me], [table[s][me] for s in range(p)], (0,)).wait()
        sends = {r: np.ones(c) for r, c in enumerate(table[me])}
        t.exchange(sends, {s: table[s][me] for s in range(p)}, float, (0,)).wait()

    world.run(program)
    for t in world.transports:
        pieces = dict(enumerate(table[t.rank]))
        want = [
            (Call("allreduce", counts=(n,)), 8),
            (Call("reduce_scatter", counts=counts), 4),
            (Call("allgather", counts=counts), 8),
            (Call("alltoall", send=pieces), 8),
            (Call("exchange", send=pieces), 8),
        ]
        got = {kind: sent for (kind, _), sent in t.counter.items().items()}
        for call, size in want:
            messages, elements = call.sent(range(p), t.rank)
            assert got.get(call.kind, Sent()) == Sent(messages, elements * size), call.kind


def test_counts_by_hand() -> None:
    """Allreduce of 5 on 3 ranks: blocks 2, 2, 1. Rank 0 sends 3 away, then its 2 twice; rank 2 sends 4 and 2."""
    world = VirtualWorld(Grid((3,)))
    world.run(lambda t: t.allreduce(np.ones(5, "float32"), (0,), tag="dw").wait())
    sent = [t.counter.items()[("allreduce", "dw")] for t in world.transports]
    assert sent == [Sent(4, 28), Sent(4, 28), Sent(4, 24)]


def test_wait_without_the_others_names_operation_tag_and_ranks() -> None:
    world = VirtualWorld(Grid((4,)))
    world.run(lambda t: t.barrier())
    request = world.transport(2).allreduce(np.ones(3), (0,), tag="conv1.dw")
    world.transport(0).allreduce(np.ones(3), (0,), tag="conv1.dw")
    assert not request.test()
    with pytest.raises(
        CommError, match=r"allreduce 'conv1.dw'.*\[0, 2\] wait for ranks \[1, 3\].*rank 1 last started barr"
    ):
        request.wait()
    with pytest.raises(CommError, match="conv1.dw"):
        world.check_idle()


MISMATCHES = {
    "operation": (
        lambda t: t.reduce_scatter(np.ones(3), [1, 1, 1], (0,), tag="x"),
        "rank 1 started reduce_scatter 'x'",
    ),
    "tag": (lambda t: t.allreduce(np.ones(3), (0,), tag="y"), "rank 1 started allreduce 'y'"),
    "dtype": (lambda t: t.allreduce(np.ones(3, "float32"), (0,), tag="x"), "rank 1 started .*float32"),
    "count": (lambda t: t.allreduce(np.ones(4), (0,), tag="x"), r"rank 1 started .*counts \(4\).*ranks \[0, 2\]"),
    "reduction": (lambda t: t.allreduce(np.ones(3), (0,), "max", tag="x"), "rank 1 started .*max"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_names_the_odd_rank(name: str) -> None:
    other, message = MISMATCHES[name]
    world = VirtualWorld(Grid((3,)))
    requests = [t.allreduce(np.ones(3), (0,), tag="x") if t.rank != 1 else other(t) for t in world.transports]
    for request in requests:
        with pytest.raises(CommError, match=message):
            request.wait()


def test_exchange_counts_must_mirror_each_other() -> None:
    world = VirtualWorld(Grid((2,)))
    a = world.transport(0).exchange({1: np.ones(3)}, {}, float, (0,), tag="halo")
    world.transport(1).exchange({}, {0: 2}, float, (0,), tag="halo")
    with pytest.raises(CommError, match="'halo': rank 0 sends 3 elements to rank 1, but rank 1 expects 2"):
        a.wait()


def test_exchange_outside_the_group_is_refused() -> None:
    world = VirtualWorld(Grid((2, 2)))
    with pytest.raises(CommError, match=r"rank 0 names ranks \[3\], which are not in its group \[0, 2\]"):
        world.transport(0).exchange({3: np.ones(3)}, {}, float, (1,))


def test_touching_a_buffer_before_wait_is_found() -> None:
    world = VirtualWorld(Grid((2,)))
    bufs = [np.ones(3), np.ones(3)]
    requests = [t.allreduce(b, (0,), tag="dw") for t, b in zip(world.transports, bufs, strict=True)]
    bufs[1][0] = 5
    requests[0].wait()
    with pytest.raises(CommError, match="rank 1 changed a buffer between start and wait"):
        requests[1].wait()


def test_nothing_arrives_before_wait() -> None:
    """A program that forgets a wait must see old data, as it would with MPI at its worst."""
    world = VirtualWorld(Grid((2,)))
    bufs = [np.ones(3), np.ones(3)]
    requests = [t.allreduce(b, (0,)) for t, b in zip(world.transports, bufs, strict=True)]
    requests[0].wait()
    assert bufs[1].tolist() == [1, 1, 1]
    requests[1].wait()
    assert bufs[1].tolist() == [2, 2, 2]


def test_run_turns_a_deadlock_into_an_error() -> None:
    world = VirtualWorld(Grid((3,)))

    def program(t: VirtualTransport) -> None:
        if t.rank != 1:
            t.allreduce(np.ones(2), (0,), tag="loss").wait()

    with pytest.raises(CommError, match=r"'loss'.*ranks \[0, 2\] wait for ranks \[1\]"):
        world.run(program)


def test_run_reports_the_cause_not_the_ranks_that_waited() -> None:
    def program(t: VirtualTransport) -> None:
        if t.rank == 2:
            raise ZeroDivisionError("rank 2")
        t.barrier()

    with pytest.raises(ZeroDivisionError, match="rank 2"):
        VirtualWorld(Grid((4,))).run(program)


def test_control_plane() -> None:
    def program(t: VirtualTransport) -> tuple[Any, ...]:
        a = t.bcast({"rank": t.rank}, 2)
        b = t.gather(t.rank * 2, 1)
        c = t.allgather_obj([t.rank])
        t.barrier()
        return a, b, c

    world = VirtualWorld(Grid((2, 2)))
    for r, (a, b, c) in enumerate(world.run(program)):
        assert a == {"rank": 2}
        assert b == ([0, 2, 4, 6] if r == 1 else None)
        assert c == [[0], [1], [2], [3]]
    world.check_idle()


def test_polling_lets_the_others_run() -> None:
    def program(t: VirtualTransport) -> float:
        request = t.allreduce(np.ones(1), (0,))
        while not request.test():
            pass
        return float(request.wait()[0])

    assert VirtualWorld(Grid((3,))).run(program) == [3.0] * 3
