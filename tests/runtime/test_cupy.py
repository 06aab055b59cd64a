"""Training steps of the engine `cupy` on the stand-in for CuPy, between ranks by NCCL and by way of the host.

Everything runs as late and in as odd an order as the recorded events allow: results equal those of the NumPy engine, and each of
many waits that are left out makes them differ.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lbpar.engine.cupy import library
from lbpar.engine.cupy.device import CupyDevice
from lbpar.engine.cupy.pinned import Pinned
from lbpar.engine.registry import get_engine
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.runtime.executor import Executor
from lbpar.runtime.initial import initial_state
from lbpar.transport import nccl
from lbpar.transport.request import Request
from lbpar.transport.single import SingleTransport
from lbpar.transport.virtual import VirtualWorld
from tests.cuda.emulator import compiler_found
from tests.util import fake_cupy
from tests.util.fake_cupy.machine import Machine
from tests.util.nccl_ranks import World
from tests.util.run import local_feeds, samples
from tests.util.two_steps import BATCH, CASES, Case, Training, assert_equal, plain

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
TOLERANCE = {"float32": 2e-5, "float64": 1e-11}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return fake_cupy.install(monkeypatch, devices=6)


def on_stand_in(patch: pytest.MonkeyPatch, case: Case, procs: int, way: str) -> Training:
    fake_cupy.few_kernels(patch, np.dtype(case.types).itemsize)
    virtual = VirtualWorld(Grid.of(procs))
    fake_cupy.between(virtual)
    engines: list[Any] = [get_engine("cupy", case.types) for _ in range(procs)]
    world: Any = World(virtual, engines) if way == "nccl" else virtual
    return Training(case, procs, world, engines)


@pytest.mark.parametrize("way", ["nccl", "host"])
@pytest.mark.parametrize(
    ("case", "procs"),
    [
        ("residual", 4),
        ("segmentation", 2),
        ("grouped", 3),
        ("regression", 6),
        ("classifier", 1),
        ("classifier", 5),
        ("shared", 1),
        ("shared", 3),
        ("shared in stages", 2),
        ("shared in stages", 4),
    ],
)
def test_steps_equal_those_of_the_numpy_engine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, case: str, procs: int, way: str
) -> None:
    want = plain(CASES[case], procs)
    training = on_stand_in(monkeypatch, CASES[case], procs, way)
    first = None
    for seed in range(2):
        machine.scheduler.seed(seed)
        got = training.run()
        assert_equal(got, want, TOLERANCE[CASES[case].types])
        assert_equal(got, first or got)  # whatever the order, the same bits
        first = got
    training.virtual.check_idle()


def test_a_second_run_needs_no_more_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    training = on_stand_in(monkeypatch, CASES["segmentation"], 1, "host")
    engine = training.engines[0]
    for _ in range(3):
        training.run()
    pool, pinned = engine.pool.total_bytes(), engine.pinned.nbytes
    for _ in range(3):
        training.run()
    assert engine.pool.total_bytes() == pool
    assert engine.pinned.nbytes <= 2 * pinned  # copies end when they like


BROKEN: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {}


def broken(way: str) -> Callable[[Callable[[pytest.MonkeyPatch], None]], None]:
    def enter(f: Callable[[pytest.MonkeyPatch], None]) -> None:
        BROKEN[f.__name__] = way, f

    return enter


@broken("nccl")
def moves_do_not_wait_for_what_they_send(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CupyDevice, "record", lambda self: self.cupy.cuda.Event(disable_timing=True))


@broken("nccl")
def kernels_do_not_wait_for_what_arrives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CupyDevice, "wait", lambda self, event: None)


@broken("nccl")
def a_move_ends_when_it_has_begun(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nccl._NcclRequest, "_finish", lambda self: None)


@broken("nccl")
def buffers_are_let_go_when_a_move_starts(patch: pytest.MonkeyPatch) -> None:
    original = Request.__init__

    def forgetful(self: Request, device: Any, keep: Any, result: Any) -> None:
        original(self, device, None, result)

    patch.setattr(Request, "__init__", forgetful)


@broken("nccl")
def the_host_reads_before_the_copy_has_ended(patch: pytest.MonkeyPatch) -> None:
    fake_cupy.machine().broken = {"synchronize"}


@broken("nccl")
def kernels_run_in_two_streams(patch: pytest.MonkeyPatch) -> None:
    original, turn = CupyDevice._pack, [0]

    def pack(self: CupyDevice, launches: Any) -> None:
        turn[0] += 1
        own, self.kernels._stream = self.kernels._stream, self._aside if turn[0] % 2 else self.stream
        original(self, launches)
        self.kernels._stream = own

    patch.setattr(CupyDevice, "_pack", pack)


@broken("nccl")
def memory_is_used_again_in_the_order_of_another_stream(patch: pytest.MonkeyPatch) -> None:
    original = CupyDevice.empty

    def empty(self: CupyDevice, shape: Any, dtype: Any = None) -> Any:
        own, self.stream = self.stream, self._aside
        try:
            return original(self, shape, dtype)
        finally:
            self.stream = own

    patch.setattr(CupyDevice, "empty", empty)


@broken("host")
def pinned_memory_is_used_again_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pinned, "give", lambda self, piece, event=None: self._free[piece.size].append(piece))


@broken("host")
def copies_to_the_host_do_not_wait_for_kernels(patch: pytest.MonkeyPatch) -> None:
    original = CupyDevice.copy_out
    early = lambda self, a, buffer, after: original(self, a, buffer, self.cupy.cuda.Event(disable_timing=True))
    patch.setattr(CupyDevice, "copy_out", early)


@broken("host")
def what_the_host_sends_is_not_there_yet(patch: pytest.MonkeyPatch) -> None:
    original = CupyDevice.copy_out

    def hasty(self: CupyDevice, a: Any, buffer: Any, after: Any) -> Any:
        original(self, a, buffer, after)
        return lambda: None

    patch.setattr(CupyDevice, "copy_out", hasty)


@broken("host")
def kernels_do_not_wait_for_copies_from_the_host(patch: pytest.MonkeyPatch) -> None:
    original = CupyDevice.copy_in
    patch.setattr(CupyDevice, "copy_in", lambda self, buffer, out: original(self, buffer, out) and None)


def test_a_thread_asks_about_moves_as_one_of_the_engines_device(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of CUDA's is on the first device until it says otherwise; what it asks there would take memory of that one."""
    fake_cupy.few_kernels(monkeypatch, 4)
    monkeypatch.setattr(library, "local_rank", lambda: 3)
    graph, engine = CASES["classifier"].graph, get_engine("cupy", "float32")
    program = lower(graph, Plan(Grid()), BATCH)
    values = initial_state(graph.params(), program.params, 0, 1, engine.dtype)
    state = {name: engine.from_host(a) for name, a in values.items()}
    executor, event = Executor(program, engine, SingleTransport(), state), engine.record()
    found, asked = list[int](), threading.Event()

    def ask() -> None:
        assert event.done in (False, True)
        found.append(machine.device)
        asked.set()

    monkeypatch.setattr(executor._transfers, "advance", ask)
    executor.progress, executor.on_update = "thread", lambda params, grads: asked.wait(30)
    executor.run(local_feeds(program, 0, samples(graph, BATCH, np.random.default_rng(0)), np.float32))
    assert set(found) == {3}


def differs(machine: Machine, training: Training, want: Any, tolerance: float) -> bool:
    """Whether steps in some order differ from what they should be, or end in an error."""
    for seed in range(4):
        machine.scheduler.seed(seed)
        try:
            assert_equal(training.run(), want, tolerance)
        except (AssertionError, ValueError, RuntimeError):
            return True
    return False


@pytest.mark.parametrize("name", [None, *BROKEN])
def test_what_is_left_out_is_seen(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """In a process of its own, which garbage that a kernel takes for addresses may end."""
    way, mutation = BROKEN[name] if name else ("nccl", lambda patch: None)
    case = CASES["residual"]
    want, training = plain(case, 2), on_stand_in(monkeypatch, case, 2, way)
    mutation(monkeypatch)

    def child() -> None:
        faulthandler.disable()
        os._exit(17 if differs(machine, training, want, TOLERANCE[case.types]) else 0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode in ((0,) if name is None else (17, -signal.SIGSEGV, -signal.SIGABRT))
