"""Training steps on a device whose queues run as late as events allow, in any order: nothing waits too little, nothing reads early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lbpar.layout.grid import Grid
from lbpar.runtime.trace import Tracer
from lbpar.transport.request import Request
from lbpar.transport.virtual import VirtualWorld
from tests.util.late import LateArray, LateEngine, LateWorld
from tests.util.queues import Queue, Scheduler
from tests.util.two_steps import BATCH, CASES, STEPS, Case, Training, assert_equal, plain

SEEDS = 20


def late(case: Case, procs: int) -> Training:
    world = LateWorld(Grid.of(procs))
    return Training(case, procs, world, [LateEngine(world.scheduler, case.types) for _ in range(procs)])


@pytest.mark.parametrize("procs", [1, 2, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps_equal_those_of_the_numpy_engine_to_the_last_bit(case: Case, procs: int) -> None:
    want, training = plain(case, procs), late(case, procs)
    assert all(np.isfinite(a).all() for ran in want for a in ran.left.values())
    results = 1 + (want[0].told[0].top1 is not None)
    clipped = 0 if case.clip is None else 1
    for seed in range(SEEDS):
        training.world.scheduler.seed(seed)
        got = training.run()
        assert_equal(got, want)
        # The host reads loss and hits once, and norms for the message that a gradient is not finite.
        assert all(ran.fetches == STEPS * (results + clipped) for ran in got)
    assert not training.world.meetings


BROKEN: dict[str, Callable[[Training, pytest.MonkeyPatch], None]] = {}


def broken(f: Callable[[Training, pytest.MonkeyPatch], None]) -> None:
    BROKEN[f.__name__] = f


@broken
def transfers_do_not_wait_for_what_they_send(t: Training, patch: pytest.MonkeyPatch) -> None:
    for e in t.engines:
        e.broken = {"record"}


@broken
def kernels_do_not_wait_for_what_arrives(t: Training, patch: pytest.MonkeyPatch) -> None:
    for e in t.engines:
        e.broken = {"wait"}


@broken
def the_host_reads_too_early(t: Training, patch: pytest.MonkeyPatch) -> None:
    for e in t.engines:
        e.broken = {"fetch"}


@broken
def buffers_are_let_go_when_a_transfer_starts(t: Training, patch: pytest.MonkeyPatch) -> None:
    original = Request.__init__

    def forgetful(self: Request, device: Any, keep: Any, result: Any) -> None:
        original(self, device, None, result)

    patch.setattr(Request, "__init__", forgetful)


@broken
def the_next_queue_starts_before_the_last_has_ended(t: Training, patch: pytest.MonkeyPatch) -> None:
    """Kernels that are ordered by events alone, as if each had a queue of its own."""

    def put(self: Queue, work: Callable[[], None]) -> Any:
        return self.follow(self.scheduler.add(work, self.waits))

    patch.setattr(Queue, "put", put)


@pytest.mark.parametrize("mutation", BROKEN.values(), ids=BROKEN)
def test_what_is_left_out_is_seen(mutation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["residual"]
    want, training = plain(case, 4), late(case, 4)
    mutation(training, monkeypatch)
    seen = 0
    for seed in range(4):
        training.world.scheduler.seed(seed)
        try:
            assert_equal(training.run(), want)
        except (AssertionError, ValueError):
            seen += 1
    assert seen == 4


def test_arrays_do_not_become_numpy_arrays() -> None:
    engine = late(CASES["classifier"], 1).engines[0]
    a = engine.zeros((3,))
    for use in (np.asarray, float, bool, list, len, lambda a: a + 1, lambda a: np.ones(3) * a):
        with pytest.raises(TypeError):
            use(a)
    assert isinstance(a[1:].reshape(2, 1), LateArray)
    assert engine.to_host(a).tolist() == [0, 0, 0]


def test_memory_that_nobody_wrote_is_poison() -> None:
    engine = late(CASES["classifier"], 1).engines[0]
    assert np.isnan(engine.to_host(engine.empty((3,)))).all()
    a = engine.zeros((5,))
    raw = a._raw
    del a
    engine.synchronize()
    assert np.isnan(raw).all()


def test_a_traced_run_and_its_times() -> None:
    training = late(CASES["classifier"], 1)
    worker = training.workers[0]
    executor = worker.executor(BATCH)
    executor.tracer = Tracer(worker.transport, worker.engine)
    training.run()
    assert executor.spent().keys() == {"compute", "update"}


@pytest.mark.parametrize("case", ["residual", "segmentation"])
def test_transports_of_the_host_move_a_device_s_arrays_by_way_of_the_host(case: str) -> None:
    want = plain(CASES[case], 4)
    scheduler, world = Scheduler(), VirtualWorld(Grid.of(4))
    training = Training(CASES[case], 4, world, [LateEngine(scheduler, CASES[case].types) for _ in range(4)])
    for seed in range(4):
        scheduler.seed(seed)
        assert_equal(training.run(), want)
    world.check_idle()
