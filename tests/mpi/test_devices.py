"""Arrays of devices between processes: by NCCL, by an MPI that takes device memory, and by way of the host, on the stand-in for CuPy.

The stand-in's device memory is memory of the host, so that this machine's MPI plays one that is CUDA-aware: it reads what is there when it
is called, whether the kernels before have run or not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from lbpar.calibrate import kernel_speeds, links
from lbpar.calibrate.machine import measure_machine
from lbpar.config.engine import EngineConfig
from lbpar.engine.cupy import library
from lbpar.engine.cupy.device import CupyDevice
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import get_engine
from lbpar.errors import Unsupported
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.program.random_plan import random_plan
from lbpar.runtime.optim.rules import SGD
from lbpar.runtime.recorded import Recorded
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport import cuda_mpi, mpi, staging
from lbpar.transport.base import Transport
from lbpar.transport.cuda_mpi import CudaMpiTransport
from lbpar.transport.mpi import MpiTransport
from lbpar.transport.nccl import NcclTransport
from lbpar.verify.compare import Reference, Update, verify_mpi
from tests.cuda.emulator import compiler_found
from tests.util import fake_cupy
from tests.util.graphs import residual_network
from tests.util.moves import moves, values
from tests.util.mpi import collective_assert
from tests.util.training import measured, run_file

pytestmark = pytest.mark.mpi
SEEDS = 2

WAYS: dict[str, Callable[[MpiTransport], Transport]] = {
    "nccl": NcclTransport,
    "nccl, short calls": lambda t: NcclTransport(t, limit=3),
    "mpi": CudaMpiTransport,
    "mpi, short calls": lambda t: CudaMpiTransport(t, limit=3),
    "mpi, blocking": lambda t: CudaMpiTransport(t, nonblocking=False),
    "host": lambda t: t,
    "host, short calls": lambda t: MpiTransport(grid=t.grid, limit=3),
}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.util.fake_cupy import nccl_mpi

    fake_cupy.install(monkeypatch, devices=8)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl_mpi)
    monkeypatch.setattr(fake_cupy.cuda, "nccl", nccl_mpi)
    nccl_mpi.install(monkeypatch)


def device() -> CupyDevice:
    class Plain(CupyDevice):
        dtype = np.dtype("float32")

    Plain.__abstractmethods__ = frozenset()
    return Plain()  # type: ignore[abstract]


def grids() -> list[Grid]:
    from mpi4py import MPI

    return {4: [Grid((4,)), Grid((2, 2))]}.get(MPI.COMM_WORLD.size, [Grid.of(MPI.COMM_WORLD.size)])


@pytest.mark.parametrize("way", WAYS)
def test_every_move_gives_what_it_gives_on_the_host(way: str) -> None:
    for grid in grids():
        plain = MpiTransport(grid=grid)
        want = [
            values(x, np.copy)
            for axes in (*((a,) for a in grid.axes), grid.axes)
            for x in moves(plain, axes, "float32", np.copy)
        ]
        counted = plain.counter.items()
        plain.counter.reset()
        own, moved = device(), WAYS[way](plain)
        moved.attach(own)
        for seed in range(SEEDS):
            fake_cupy.machine().scheduler.seed(seed)
            got = [
                values(x, own.to_host)
                for axes in (*((a,) for a in grid.axes), grid.axes)
                for x in moves(moved, axes, "float32", own.from_host)
            ]
            with collective_assert(plain):
                assert got == want
        with collective_assert(plain):
            assert {k: v.bytes for k, v in moved.counter.items().items()} == {
                k: SEEDS * v.bytes for k, v in counted.items()
            }
        moved.close()


def all_moves(t: Transport, put: Any, get: Any) -> list[Any]:
    """Every move, twice; between them the first rank alone sends much, and only to the second."""
    axes = t.grid.axes
    first = [values(x, get) for x in moves(t, axes, "float32", put)]
    sends, recvs = ({1: put(np.arange(20, dtype=np.float32))} if t.rank == 0 else {}), ({0: 20} if t.rank == 1 else {})
    one = t.exchange(sends, recvs, np.dtype("float32"), axes, "one")
    return [*first, *(values(x, get) for x in moves(t, axes, "float32", put)), values(one.wait(), get)]


@pytest.mark.parametrize("way", ["host", "host, short calls"])
def test_long_moves_by_way_of_the_host_go_in_parts(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Values and bytes are those of whole moves, though members have different numbers of parts; messages are more."""
    monkeypatch.setattr(staging, "CHUNK", 4)
    monkeypatch.setattr(staging, "LEAST", 1)
    for grid in grids():
        plain = MpiTransport(grid=grid)
        want = all_moves(plain, np.copy, np.copy)
        counted = plain.counter.items()
        plain.counter.reset()
        own, moved = device(), WAYS[way](plain)
        moved.attach(own)
        for seed in range(SEEDS):
            fake_cupy.machine().scheduler.seed(seed)
            moved.counter.reset()
            got = all_moves(moved, own.from_host, own.to_host)
            sent = {kind: plain.allgather_obj((moved.counter.items()[kind], counted[kind])) for kind in counted}
            with collective_assert(plain):
                assert got == want
                assert all(parts.bytes == whole.bytes for ranks in sent.values() for parts, whole in ranks)
                for kind in (
                    ("reduce_scatter", "e"),
                    ("allgather", "g"),
                    ("alltoall", "h"),
                    ("exchange", "i"),
                    ("exchange", "one"),
                ):
                    more, one = (sum(found.messages for found in side) for side in zip(*sent[kind], strict=True))
                    assert more > one, kind
        if moved is not plain:
            moved.close()
        plain.close()


def test_parts_give_the_bits_of_a_whole_reduce_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers whose sums depend on the order."""
    monkeypatch.setattr(mpi, "PAIRWISE", 1)
    plain = MpiTransport()
    counts = [(7 * r) % 5 + 2 for r in range(plain.size)]
    mine = np.random.default_rng(plain.rank).standard_normal(sum(counts)).astype(np.float32)
    want = plain.reduce_scatter(mine.copy(), counts, plain.grid.axes).wait()
    own = device()
    plain.attach(own)
    monkeypatch.setattr(staging, "CHUNK", 2 * plain.size)
    monkeypatch.setattr(staging, "LEAST", 1)
    plain.counter.reset()
    got = own.to_host(plain.reduce_scatter(own.from_host(mine), counts, plain.grid.axes).wait())
    with collective_assert(plain):
        assert got.tobytes() == want.tobytes()
        assert plain.counter.total().messages > plain.size - 1
    plain.close()


@pytest.mark.parametrize("way", ["nccl", "mpi", "host"])
def test_half_types_move(way: str) -> None:
    import ml_dtypes

    plain = MpiTransport()
    own, moved = device(), WAYS[way](plain)
    moved.attach(own)
    mine = np.arange(4).astype(ml_dtypes.bfloat16) + moved.rank
    joined = moved.allgather(own.from_host(mine.copy()), [4] * moved.size, moved.grid.axes).wait()
    around = moved.exchange(
        {(moved.rank + 1) % moved.size: own.from_host(mine.copy())},
        {(moved.rank - 1) % moved.size: 4},
        mine.dtype,
        moved.grid.axes,
    ).wait()
    with collective_assert(plain):
        assert joined.dtype == mine.dtype
        read = lambda a: own.to_host(a.view(np.uint16)).view(mine.dtype).tolist()
        assert read(joined) == [i + r for r in range(moved.size) for i in range(4)]
        (back,) = around.values()
        assert read(back) == [i + (moved.rank - 1) % moved.size for i in range(4)]
        if way == "mpi":
            with pytest.raises(Unsupported, match="MPI has no type for bfloat16"):
                moved.allreduce(own.from_host(mine.copy()), moved.grid.axes).wait()
    moved.close()


@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
@pytest.mark.parametrize("way", ["nccl", "mpi", "host"])
def test_training_steps_under_random_plans(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Halos and their interiors, sums of gradients, changes of layout: as one rank in NumPy."""
    fake_cupy.few_kernels(monkeypatch, 8)
    plain = MpiTransport()
    update = Update(residual_network(), 4, 1, lambda _: SGD(0.1, momentum=0.9), 0.1)
    reference = Reference(update, NumpyEngine("float64"))
    for seed in range(2):
        plan = random_plan(update.graph, 4, plain.size, Random(seed))
        plain = MpiTransport(grid=plan.grid)
        moved = WAYS[way](plain)
        fake_cupy.machine().scheduler.seed(seed)
        parity = verify_mpi(reference, plan, moved, get_engine("cupy", "float64"))
        with collective_assert(plain):
            assert parity.worst < 1e-10
            assert sum(parity.sent.values()) > 0
        moved.close()


def test_a_message_that_leaves_before_its_kernels_have_run_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_mpi._Held, "ready", lambda self: True)
    monkeypatch.setattr(fake_cupy.cuda.Event, "synchronize", lambda self: None)
    plain = MpiTransport()
    own, moved = device(), CudaMpiTransport(plain)
    moved.attach(own)
    moved.prepare([moved.grid.axes])
    fake_cupy.machine().scheduler.seed(0)
    right, left = (moved.rank + 1) % moved.size, (moved.rank - 1) % moved.size
    ones: Any = own.from_host(np.ones(4, np.float32))
    came: Any = moved.exchange({right: ones}, {left: 4}, np.dtype("float32"), moved.grid.axes).wait()[left]
    with collective_assert(plain):
        assert np.isnan(came._raw).all()
    moved.close()


def test_a_sum_that_is_held_back_takes_no_memory_that_kernels_still_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_mpi._Held, "ready", lambda self: False)
    plain = MpiTransport()
    own, moved = device(), CudaMpiTransport(plain)
    moved.attach(own)
    sevens: Any = own.from_host(np.full(64, 7, np.float32))
    ones: Any = own.from_host(np.ones(64 * moved.size, np.float32))
    held = moved.reduce_scatter(ones, [64] * moved.size, moved.grid.axes)
    written: list[Any] = [own.copy(sevens) for _ in range(8)]
    places = {a.data.ptr for a in written}
    del written  # the pool gives that memory away again at once, before it is written
    got: Any = held.wait()
    with collective_assert(plain):
        assert got.data.ptr not in places
        assert own.to_host(got).tolist() == [moved.size] * 64
    moved.close()


@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
def test_recorded_steps_leave_the_bits_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process runs what it has launched in any order that events allow: NCCL's calls are the same on all ranks all the same."""
    fake_cupy.few_kernels(monkeypatch, 4)
    launched, run = list[bool](), Recorded._run
    monkeypatch.setattr(Recorded, "_run", lambda self, s: (run(self, s), launched.append(s.launch is not None)))
    ran, twice = [], ["train.accumulate=2", "train.epochs=6"]
    for options in ([], ["engine.graphs=true"], twice, [*twice, "engine.graphs=true"]):
        config = run_file(["engine.name=cupy", "engine.dtype=float32", "parallel.strategy=spatial", *options])
        graph = build_graph(config)
        plain = MpiTransport()
        plan = build_plan(config, graph, plain.size)
        plain.close()
        moved = NcclTransport(MpiTransport(grid=plan.grid))
        trainer = Trainer(config, graph, plan, moved)
        records = [measured(record) for record in trainer.train()]
        ran.append((records, {n: trainer.engine.to_host(a).tobytes() for n, a in trainer.worker.state.items()}))
        told = moved.allgather_obj(sum(launched))
        moved.close()
    with collective_assert(MpiTransport()):
        assert ran[1] == ran[0] and ran[3] == ran[2]
        assert launched and all(launched) and len(set(told)) == 1


def test_links_are_measured_between_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_speeds, "STREAM", 1 << 10)
    monkeypatch.setattr(kernel_speeds, "ON_DEVICE", 1)
    monkeypatch.setattr(links, "ROWS", (1, 8, 64))
    monkeypatch.setattr(links, "MOST_ROWS", 256)
    monkeypatch.setattr(links, "LEAST_ROUNDS", 1)
    plain = MpiTransport(grid=grids()[-1])
    made: list[NcclTransport] = []
    connected = NcclTransport.connect
    monkeypatch.setattr(NcclTransport, "connect", lambda t: (made.append(t), connected(t)))
    monkeypatch.setattr(library, "place", lambda _: f"GPU {plain.rank}")
    g = GraphBuilder((4, 4, 2))
    graph = g.build(g.linear(g.flatten(g.relu(g.conv(g.input, 2, 3, pad=1))), 3)).with_loss(CrossEntropy())
    found = measure_machine(EngineConfig(name="cupy", threads=1), (), 1, plain, 0.0, network=(graph, 4))
    total = sum(plain.allgather_obj(1))
    with collective_assert(plain):
        assert len(made) == 1
        assert made[0]._world is None
        assert total == plain.size  # the job's own connection stays
        assert {m.kind for level in found.file.levels for m in level.moves} == set(links.MOVES)
        assert found.file.memory == fake_cupy.machine().memory
    plain.close()
