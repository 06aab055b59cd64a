"""Moves of device arrays: by NCCL and by way of the host, between virtual ranks, against those of NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar.engine.cupy.device import CupyDevice
from lbpar.errors import CommError, Unsupported
from lbpar.layout.grid import Grid
from lbpar.transport import mpi, nccl, staging
from lbpar.transport.base import Transport
from lbpar.transport.checked import CheckedTransport
from lbpar.transport.nccl import NcclTransport
from lbpar.transport.virtual import VirtualWorld
from tests.util import fake_cupy
from tests.util.moves import moves, values

GRIDS = [Grid((2,)), Grid((3,)), Grid((2, 3)), Grid((2, 1, 2))]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    return fake_cupy.install(monkeypatch, devices=4)


def device() -> CupyDevice:
    CupyDevice.__abstractmethods__ = frozenset()
    made = CupyDevice()  # type: ignore[abstract]
    made.dtype = np.dtype("float32")
    return made


def run(grid: Grid, dtype: Any, wrap: Any, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """What all ranks got over each set of axes, and their counters."""
    world = VirtualWorld(grid)
    fake_cupy.between(world)
    fake_cupy.machine().scheduler.seed(seed)

    def rank(t: Transport) -> Any:
        moved, own = wrap(t)
        out = []
        for axes in [(), *((a,) for a in grid.axes), grid.axes]:
            put, get = (own.from_host, own.to_host) if own else (np.copy, np.copy)
            out.append([values(x, get) for x in moves(moved, axes, dtype, put)])
        return out, moved.counter.items()

    results = world.run(rank)
    world.check_idle()
    return [r for r, _ in results], [c for _, c in results]


def by_nccl(limit: int = nccl.LIMIT, checked: bool = False) -> Any:
    def wrap(t: Transport) -> tuple[Transport, CupyDevice]:
        moved: Transport = NcclTransport(t, limit)
        own = device()
        if checked:
            moved = CheckedTransport(moved)
        moved.attach(own)
        return moved, own

    return wrap


def by_host(t: Transport) -> tuple[Transport, CupyDevice]:
    own = device()
    t.attach(own)
    return t, own


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_move_gives_what_it_gives_on_the_host(grid: Grid, dtype: str) -> None:
    want = run(grid, dtype, lambda t: (t, None))
    for wrap in (by_nccl(), by_nccl(1), by_nccl(3), by_host):
        for seed in range(2):
            assert run(grid, dtype, wrap, seed) == want


@pytest.mark.parametrize("grid", [*GRIDS, Grid((4,))], ids=str)
def test_what_all_members_know_goes_by_way_of_the_host_in_parts(monkeypatch: pytest.MonkeyPatch, grid: Grid) -> None:
    """Values and bytes are those of one move; messages are more."""
    want, counted = run(grid, "float32", lambda t: (t, None))
    monkeypatch.setattr(staging, "CHUNK", 4)
    monkeypatch.setattr(staging, "LEAST", 1)
    for seed in range(3):
        got, parts = run(grid, "float32", by_host, seed)
        assert got == want
        for a, b in zip(parts, counted, strict=True):
            assert {k: v.bytes for k, v in a.items()} == {k: v.bytes for k, v in b.items()}
            for kind in (("allreduce", "a"), ("reduce_scatter", "e"), ("allgather", "g")):
                assert a[kind].messages > b[kind].messages
            for kind in (("alltoall", "h"), ("exchange", "i")):  # of which members would have different numbers
                assert a[kind] == b[kind]


def test_no_part_is_so_short_that_its_sum_would_be_another() -> None:
    """MPI's reduce-scatter of less memory for each member is summed in an order of the library's; parts have half of `LEAST` or more."""
    assert staging.LEAST // 2 * np.dtype("float16").itemsize >= mpi.PAIRWISE


def test_the_checked_mode_wraps_it() -> None:
    want, _ = run(Grid((2, 3)), "float32", lambda t: (t, None))
    assert run(Grid((2, 3)), "float32", by_nccl(checked=True))[0] == want


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="NCCL has no type for complex64"):
        run(Grid((2,)), "complex64", by_nccl())
    monkeypatch.setattr(fake_cupy.nccl, "available", False)
    with pytest.raises(CommError, match=r"NCCL cannot be loaded \(libnccl.*lbpar\[cuda13\]"):
        run(Grid((2,)), "float32", by_nccl())


def test_an_error_of_nccl_names_the_move_and_aborts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(t: Transport) -> Any:
        moved, own = by_nccl()(t)
        moved.prepare([(0,)])
        if t.rank == 1:
            for comm in moved._comms.values():
                comm.abort()
        t.barrier()
        with pytest.raises(CommError, match=r"allreduce 'x': NCCL reports NCCL_ERROR_REMOTE_ERROR"):
            if t.rank == 0:
                moved.allreduce(own.zeros((3,)), (0,), tag="x")
            else:
                raise CommError("allreduce 'x': NCCL reports NCCL_ERROR_REMOTE_ERROR")
        with pytest.raises(CommError, match="aborted the job: that is enough"):
            moved.abort("that is enough")
        moved.close()

    VirtualWorld(Grid((2,))).run(rank)
