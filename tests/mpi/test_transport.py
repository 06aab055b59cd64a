"""The MPI transport against plain loops over what all ranks are known to hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lbpar.errors import CommError, LbparError
from lbpar.layout.grid import Axes, Grid
from lbpar.transport.base import Sent
from lbpar.transport.checked import CheckedTransport
from lbpar.transport.launch import connect
from lbpar.transport.mpi import LIMIT, MpiTransport
from lbpar.transport.virtual import VirtualWorld
from tests.util.mpi import collective_assert

pytestmark = pytest.mark.mpi

DTYPES = ["float32", "float64", "int64", "uint8"]


@pytest.fixture(params=[(LIMIT, None), (1, True), (5, False)], ids=["default", "limit1-patient", "limit5-spinning"])
def transport(request: pytest.FixtureRequest) -> Iterator[MpiTransport]:
    limit, patient = request.param
    t = MpiTransport(limit=limit, patient=patient)
    yield t
    t.close()


def axes_sets(grid: Grid) -> list[Axes]:
    return [(), *((a,) for a in grid.axes), grid.axes]


def part(rank: int, n: int, dtype: Any = "float64") -> np.ndarray:
    """What ``rank`` holds: small integers, so that sums are exact in any order and type."""
    return ((np.arange(n) * 7 + rank * 3) % 11).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("n", [0, 1, 7, 16])
def test_allreduce(transport: MpiTransport, n: int, op: Any, dtype: str) -> None:
    for axes in axes_sets(transport.grid):
        got = transport.allreduce(part(transport.rank, n, dtype), axes, op, "started").wait()
        now = transport.allreduce(part(transport.rank, n, dtype), axes, op, "at once", blocking=True).wait()
        everything = np.array([part(r, n, dtype) for r in transport.group(axes)])
        want = everything.sum(0) if op == "sum" else everything.max(0)
        with collective_assert(transport):
            for result in (got, now):
                assert result.dtype == np.dtype(dtype)
                np.testing.assert_array_equal(result, want)
            sent = transport.counter.by_tag()
            assert sent.get("started") == sent.get("at once")


@pytest.mark.parametrize("counts", [[4, 0, 3, 2], [0, 0, 0, 5], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_reduce_scatter_and_allgather(transport: MpiTransport, counts: list[int]) -> None:
    for axes in axes_sets(transport.grid):
        group = transport.group(axes)
        place = group.index(transport.rank)
        own = counts[: len(group)]
        start, stop = sum(own[:place]), sum(own[: place + 1])
        want = sum(part(r, sum(own)) for r in group)
        piece = transport.reduce_scatter(part(transport.rank, sum(own)), own, axes).wait()
        whole = transport.allgather(np.ascontiguousarray(piece), own, axes).wait()
        with collective_assert(transport):
            np.testing.assert_array_equal(piece, want[start:stop])
            np.testing.assert_array_equal(whole, want)


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("tested", [False, True])
def test_long_reduce_scatters_are_messages_between_pairs(op: Any, tested: bool) -> None:
    transport = MpiTransport(limit=10_000)
    counts = [9_000 + 777 * i for i in range(transport.size)]
    counts[-1] = 0
    n = sum(counts) + 20_000 * transport.size
    counts[0] += 20_000 * transport.size
    start = sum(counts[: transport.rank])
    everything = np.array([part(r, n, "float32") for r in range(transport.size)])
    want = everything.sum(0) if op == "sum" else everything.max(0)
    one = transport.reduce_scatter(part(transport.rank, n, "float32"), counts, transport.grid.axes, op, "a")
    two = transport.reduce_scatter(part(transport.rank, n, "float32"), counts, transport.grid.axes, op, "b")
    while tested and not (one.test() and two.test()):
        pass
    got = [two.wait(), one.wait(), one.wait()]  # in any order, and again
    with collective_assert(transport):
        for result in got:
            np.testing.assert_array_equal(result, want[start : start + counts[transport.rank]])
    transport.close()


def test_reduce_scatter_maximum(transport: MpiTransport) -> None:
    counts = [2] * transport.size
    want = np.max([part(r, 2 * transport.size) for r in range(transport.size)], axis=0)
    got = transport.reduce_scatter(part(transport.rank, 2 * transport.size), counts, transport.grid.axes, "max").wait()
    with collective_assert(transport):
        np.testing.assert_array_equal(got, want[2 * transport.rank : 2 * transport.rank + 2])


def test_alltoall_with_uneven_and_empty_pieces(transport: MpiTransport) -> None:
    def count(source: int, target: int) -> int:
        return (source * 5 + target * 3) % 4 * 2

    for axes in axes_sets(transport.grid):
        group, me = transport.group(axes), transport.rank
        send, recv = [count(me, t) for t in group], [count(s, me) for s in group]
        pieces = [part(10 * me + t, count(me, t)) for t in group]
        got = transport.alltoall(np.concatenate(pieces), send, recv, axes).wait()
        with collective_assert(transport):
            np.testing.assert_array_equal(got, np.concatenate([part(10 * s + me, count(s, me)) for s in group]))


def test_outstanding_exchanges_do_not_mix(transport: MpiTransport) -> None:
    """Three exchanges between the same pairs, of different sizes, waited for in reverse."""
    me, p = transport.rank, transport.size
    left, right = (me - 1) % p, (me + 1) % p
    requests = []
    for k in (1, 2, 3):
        sends = {right: part(100 * me + k, 4 * k, "float32")}
        if k == 2:
            sends = {right: sends[right], me: part(me, 3, "float32")}
        recvs = {left: 4 * k, me: 3} if k == 2 else {left: 4 * k}
        requests.append(transport.exchange(sends, recvs, "float32", transport.grid.axes))
    results = [r.wait() for r in reversed(requests)][::-1]
    with collective_assert(transport):
        for k, got in zip((1, 2, 3), results, strict=True):
            np.testing.assert_array_equal(got[left], part(100 * left + k, 4 * k, "float32"))
        np.testing.assert_array_equal(results[1][me], part(me, 3, "float32"))


def test_exchange_on_overlapping_groups(transport: MpiTransport) -> None:
    """The same pair exchanges over one axis and over all axes at the same time."""
    axes, me = transport.grid.axes[:1], transport.rank
    group = transport.group(axes)
    other = group[(group.index(me) + 1) % len(group)]
    source = group[(group.index(me) - 1) % len(group)]
    a = transport.exchange({other: part(me, 6)}, {source: 6}, "float64", axes)
    b = transport.exchange({other: part(me + 50, 6)}, {source: 6}, "float64", transport.grid.axes)
    got_b, got_a = b.wait(), a.wait()
    with collective_assert(transport):
        np.testing.assert_array_equal(got_a[source], part(source, 6))
        np.testing.assert_array_equal(got_b[source], part(source + 50, 6))


def test_requests_progress_when_tested(transport: MpiTransport) -> None:
    request = transport.allreduce(np.ones(9), transport.grid.axes)
    while not request.test():
        pass
    with collective_assert(transport):
        assert request.wait()[0] == transport.size == request.wait()[-1]


def program(t: Any) -> dict[tuple[str, str], Sent]:
    """Every operation once, with sizes that leave uneven and empty blocks."""
    axes, p = t.grid.axes, t.size
    counts = [3, 0, 2, 1][:p]
    t.allreduce(np.ones(2 * p + 1, "float32"), axes, tag="a").wait()
    t.allreduce(np.ones(1), axes[:1], tag="b").wait()
    t.reduce_scatter(np.ones(sum(counts)), counts, axes, tag="c").wait()
    t.allgather(np.ones(counts[t.rank]), counts, axes, tag="d").wait()
    send, recv = [counts[t.rank]] * p, counts
    t.alltoall(np.ones(sum(send)), send, recv, axes, tag="e").wait()
    t.exchange({(t.rank + 1) % p: np.ones(5)}, {(t.rank - 1) % p: 5}, "float64", axes, tag="f").wait()
    return t.counter.items()


def test_counts_are_those_of_the_virtual_world(transport: MpiTransport) -> None:
    """The formulas of one against the pieces that the other really copies."""
    got = program(transport)
    want = VirtualWorld(transport.grid).run(program)[transport.rank]
    with collective_assert(transport):
        assert {k: v for k, v in got.items() if v.messages} == {k: v for k, v in want.items() if v.messages}


def test_control_plane(transport: MpiTransport) -> None:
    last = transport.size - 1
    a = transport.bcast({"x": 1} if transport.rank == last else None, last)
    b = transport.gather(transport.rank**2, last)
    c = transport.allgather_obj(str(transport.rank))
    transport.barrier()
    with collective_assert(transport):
        assert a == {"x": 1}
        assert b == ([r**2 for r in range(transport.size)] if transport.rank == last else None)
        assert c == [str(r) for r in range(transport.size)]


def test_close_frees_communicators() -> None:
    """Libraries have a few thousand communicators; a leak shows as an error."""
    for _ in range(300):
        t = MpiTransport()
        t.prepare(axes_sets(t.grid))
        t.close()
        t.close()
    with pytest.raises(CommError, match="closed"):
        t.allreduce(np.ones(1), t.grid.axes)


def test_groups_are_made_once_per_set_of_axes(transport: MpiTransport) -> None:
    made = []
    for _ in range(3):
        for axes in axes_sets(transport.grid):
            p = len(transport.group(axes))
            transport.allreduce(part(transport.rank, 5), axes).wait()
            transport.allgather(part(transport.rank, 2), [2] * p, axes).wait()
            transport.alltoall(part(transport.rank, p), [1] * p, [1] * p, axes).wait()
        made.append(dict(transport._comms))
    with collective_assert(transport):
        assert set(made[0]) <= set(axes_sets(transport.grid)) and transport.grid.axes in made[0]
        assert all(later.keys() == made[0].keys() for later in made)
        assert all(later[axes] is comm for later in made for axes, comm in made[0].items())


def test_user_communicator_and_grid() -> None:
    """Ranks in another order than the world's; the user's communicator stays usable."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    user = world.Split(0, -world.rank)
    t = MpiTransport(user, Grid((1, user.size, 1)))
    got = t.allgather(np.array([world.rank]), [1] * t.size, (0, 1)).wait()
    t.close()
    still = user.allgather(world.rank)
    user.Free()
    with collective_assert(world):
        assert got.tolist() == list(range(world.size))[::-1] == still
        assert t.rank == world.size - 1 - world.rank
    with pytest.raises(CommError, match="Start 7 ranks"):
        MpiTransport(world, Grid.of(7))


@pytest.mark.parametrize("count", [5, 70_000])  # the second is summed by the receivers
@pytest.mark.parametrize("op", ["sum", "max"])
def test_bfloat16_is_summed_in_two_bytes(transport: MpiTransport, op: str, count: int) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    axes, p = transport.grid.axes, transport.size
    count = min(count, 100 * transport._limit)  # or there are thousands of messages
    values = np.arange(count) % 50
    mine = (values + transport.rank).astype(ml_dtypes.bfloat16)
    want = (p * values + p * (p - 1) / 2 if op == "sum" else values + p - 1).astype(ml_dtypes.bfloat16)  # exact: 8 bits
    counts = [count // p] * (p - 1)
    counts.append(count - sum(counts))
    begin = transport.counter.total().bytes
    for blocking in (False, True):
        got = transport.allreduce(mine.copy(), axes, op, "sum", blocking=blocking).wait()
        with collective_assert(transport):
            assert got.dtype == mine.dtype and (got == want).all()
    sent = transport.counter.total().bytes - begin
    part = transport.reduce_scatter(mine.copy(), counts, axes, op, "parts").wait()
    start = sum(counts[: transport.rank])
    with collective_assert(transport):
        assert part.dtype == mine.dtype and (part == want[start : start + len(part)]).all()
        assert sent <= 2 * 2 * mine.nbytes


def test_wrong_buffers_are_refused(transport: MpiTransport) -> None:
    axes, p = transport.grid.axes, transport.size
    with collective_assert(transport):
        with pytest.raises(CommError, match="1-D contiguous"):
            transport.allreduce(np.ones((2, 2)), axes)
        with pytest.raises(CommError, match="1-D contiguous"):
            transport.allreduce(np.ones(8)[::2], axes)
        with pytest.raises(CommError, match="holds 3 elements, but its counts say 4"):
            transport.reduce_scatter(np.ones(3), [4] + [0] * (p - 1), axes)
        with pytest.raises(CommError, match=f"expected {p} counts"):
            transport.allgather(np.ones(1), [1] * (p + 1), axes)
        with pytest.raises(CommError, match=r"names ranks \[99\]"):
            transport.exchange({99: np.ones(1)}, {}, "float64", axes)
        with pytest.raises(LbparError, match="MPI has no type for float16"):
            transport.allreduce(np.ones(2, "float16"), axes)


def test_checked_mode_names_the_odd_rank(transport: MpiTransport) -> None:
    checked = CheckedTransport(transport, seconds=30)
    axes, odd = transport.grid.axes, transport.size - 1
    tag = "conv2.dw" if transport.rank == odd else "conv1.dw"
    with (
        collective_assert(transport),
        pytest.raises(CommError, match=f"rank {odd} started allreduce 'conv2.dw'" if odd > 1 else "ranks disagree"),
    ):
        checked.allreduce(np.ones(3), axes, tag=tag)


def test_checked_mode_changes_neither_results_nor_counts(transport: MpiTransport) -> None:
    plain = program(transport)
    transport.counter.reset()
    checked = program(CheckedTransport(transport, seconds=30))
    with collective_assert(transport):
        assert checked == plain


def test_connect() -> None:
    t = connect()
    total = t.allreduce(np.ones(1), t.grid.axes).wait()
    same = t.counter.total()
    t.close()
    with collective_assert(t_world()):
        assert isinstance(t, MpiTransport)
        assert total[0] == t.size
        assert same.messages == 2 * (t.size - 1), "the self-test is not counted"


def t_world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD
