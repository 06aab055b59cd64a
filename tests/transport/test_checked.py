from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lbpar.engine.device import HOST
from lbpar.errors import CommError
from lbpar.layout.grid import Grid
from lbpar.transport.base import Sent
from lbpar.transport.checked import CheckedTransport
from lbpar.transport.request import Done, Request
from lbpar.transport.single import SingleTransport
from lbpar.transport.virtual import VirtualTransport, VirtualWorld


def run(program: Callable[[CheckedTransport], object], grid: Grid) -> VirtualWorld:
    """On transports of the virtual world that find no mistakes by themselves: only the wrapper can."""
    world = VirtualWorld(grid)
    world.run(lambda t: program(CheckedTransport(t)))
    return world


def test_results_and_counts_stay_the_same() -> None:
    def program(t: CheckedTransport) -> None:
        assert t.allreduce(np.ones(5), (0, 1), tag="a").wait().tolist() == [4] * 5
        assert t.reduce_scatter(np.ones(3), [1, 2], (1,), tag="b").wait().tolist() in ([2], [2, 2])
        assert t.allgather(np.ones(1), [1, 1], (0,), tag="c").wait().size == 2
        assert t.alltoall(np.ones(2), [1, 1], [1, 1], (0,), tag="d").wait().size == 2
        other = t.rank ^ 1
        assert t.exchange({other: np.full(2, t.rank)}, {other: 2}, int, (0,), tag="e").wait()[other][0] == other
        assert t.bcast(t.rank, 1) == 1
        assert t.gather(t.rank) in ([0, 1, 2, 3], None)
        assert t.allgather_obj(t.rank) == [0, 1, 2, 3]
        t.barrier()

    world = run(program, Grid((2, 2)))
    assert world.transport(0).counter.by_tag() == {
        "a": Sent(6, 8 * (3 + 6)),
        "b": Sent(1, 8 * 2),
        "c": Sent(1, 8),
        "d": Sent(1, 8),
        "e": Sent(1, 16),
    }


MISTAKES: dict[str, tuple[Callable[[CheckedTransport], object], str]] = {
    "tag": (
        lambda t: t.allreduce(np.ones(2), (0,), tag=f"conv{t.rank // 3}.dw"),
        "rank 3 started allreduce 'conv1.dw'",
    ),
    "operation": (
        lambda t: t.allreduce(np.ones(4), (0,)) if t.rank else t.reduce_scatter(np.ones(4), [1] * 4, (0,)),
        "rank 0 started reduce_scatter",
    ),
    "dtype": (lambda t: t.allreduce(np.ones(2, "f4" if t.rank == 2 else "f8"), (0,)), "rank 2 started .*float32"),
    "counts": (lambda t: t.allreduce(np.ones(2 + (t.rank == 1)), (0,)), r"rank 1 started .*counts \(3\)"),
    "root": (lambda t: t.bcast(1, root=int(t.rank == 2)), "rank 2 started bcast 'root 1'"),
    "halo": (
        lambda t: t.exchange({3: np.ones(2)} if t.rank == 1 else {}, {1: 5} if t.rank == 3 else {}, float, (0,)),
        "rank 1 sends 2 elements to rank 3, but rank 3 expects 5",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_rank_learns_which_rank_is_odd(name: str) -> None:
    mistake, message = MISTAKES[name]
    told = []

    def program(t: CheckedTransport) -> None:
        with pytest.raises(CommError, match="checked transport: operation 1 .*" + message):
            t.barrier()
            mistake(t)
        told.append(t.rank)

    run(program, Grid((4,)))
    assert sorted(told) == [0, 1, 2, 3]


def test_a_rank_that_never_comes_is_reported_after_the_limit() -> None:
    class Never(Request):
        def _finish(self) -> None:
            raise AssertionError("nobody may wait for this")

        def test(self) -> bool:
            return False

    world = VirtualWorld(Grid((2,)))
    inner: VirtualTransport = world.transport(1)
    inner.allgather = lambda *a, **k: Never(HOST, None, None)  # type: ignore[method-assign]
    with pytest.raises(CommError, match=r"rank 1 waited 0 s to start allreduce 'x'.*group \[0, 1\]"):
        CheckedTransport(inner, seconds=0).allreduce(np.ones(1), (0,), tag="x")


def test_one_rank_needs_no_comparison() -> None:
    t = CheckedTransport(SingleTransport())
    assert isinstance(t.allreduce(np.ones(2), ()), Done)
    with pytest.raises(CommError, match="sends 2 elements to itself but expects 1"):
        t.exchange({0: np.ones(2)}, {0: 1}, float, ())
