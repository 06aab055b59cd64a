"""What recorded moves need, left out: each is noticed, by the stand-in's CUDA and NCCL or by other bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from lbpar.engine.cupy.device import CupyDevice
from lbpar.errors import CommError, EngineError
from lbpar.runtime import worker
from lbpar.runtime.recorded import Recorded
from lbpar.train.trainer import Trainer
from lbpar.transport.nccl import NcclTransport, _NcclRequest
from tests.cuda.emulator import compiler_found
from tests.util.nccl_ranks import GRAPHS, noted_programs, trained
from tests.util.training import assert_same

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    return noted_programs(monkeypatch)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def fault(f: Callable[[pytest.MonkeyPatch], None]) -> None:
    FAULTS[f.__name__] = f


def _joins(patch: pytest.MonkeyPatch, unless: Callable[[NcclTransport], bool]) -> None:
    join = NcclTransport.join
    patch.setattr(NcclTransport, "join", lambda self: None if unless(self) else join(self))


@fault
def moves_that_go_on_are_not_joined_where_a_recording_ends(patch: pytest.MonkeyPatch) -> None:
    _joins(patch, lambda t: t.device._capturing)  # type: ignore[attr-defined]


@fault
def moves_under_way_go_on_beside_those_that_are_launched(patch: pytest.MonkeyPatch) -> None:
    recording, record = [False], Recorded._record

    def noted(self: Recorded, stretch: Any) -> bool:
        recording[0] = True
        try:
            return record(self, stretch)
        finally:
            recording[0] = False

    patch.setattr(Recorded, "_record", noted)
    _joins(patch, lambda t: not recording[0])


@fault
def the_stream_of_moves_is_not_drawn_into_a_recording(patch: pytest.MonkeyPatch) -> None:
    _starts(patch, lambda t: t.device._capturing)  # type: ignore[attr-defined]


@fault
def later_moves_do_not_wait_for_what_they_send(patch: pytest.MonkeyPatch) -> None:
    _starts(patch, lambda t: t.device._capturing and t._open)  # type: ignore[attr-defined]


def _starts(patch: pytest.MonkeyPatch, early: Callable[[NcclTransport], bool]) -> None:
    start = NcclTransport._start

    def hasty(self: NcclTransport, call: Any, buf: Any, out: Any, after: Any) -> Any:
        return start(self, call, buf, out, self._cuda.Event(disable_timing=True) if early(self) else after)

    patch.setattr(NcclTransport, "_start", hasty)


@fault
def kernels_do_not_wait_for_what_arrives(patch: pytest.MonkeyPatch) -> None:
    finish = _NcclRequest._finish
    patch.setattr(
        _NcclRequest, "_finish", lambda self: None if self._device._capturing else finish(self)  # type: ignore[attr-defined]
    )  # fmt: skip


@fault
def who_waits_later_waits_for_an_event_of_the_recording(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_NcclRequest, "_finish", lambda self: self._event)


@fault
def each_rank_decides_for_itself(patch: pytest.MonkeyPatch) -> None:
    capture = CupyDevice.capture

    def failing(self: CupyDevice, run: Callable[[], None]) -> Any:
        if threading.current_thread().name == "rank 1":
            raise EngineError("no more")
        return capture(self, run)

    patch.setattr(CupyDevice, "capture", failing)
    patch.setattr(NcclTransport, "allgather_obj", lambda self, obj: [obj])


@fault
def graphs_outlive_their_communicators(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CupyDevice, "drop_captures", lambda self: None)


@pytest.mark.parametrize("name", [None, *FAULTS])
def test_faults_are_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, programs: list[Recorded], name: str | None
) -> None:
    """By an error, other bits, or steps that cannot be recorded."""

    def job(trainer: Trainer) -> list[dict[str, Any]]:
        records = list(trainer.train())
        trainer.transport.disconnect()
        return records

    changes = ["train.accumulate=3", "train.epochs=5"]
    monkeypatch.setattr(worker, "BUCKET_BYTES", 0)  # gradients travel while others, and what these need, do
    plain = trained(monkeypatch, "spatial 4", changes, job)
    if name is not None:
        FAULTS[name](monkeypatch)
    noticed = False
    for seed in range(3):
        try:
            assert_same(trained(monkeypatch, "spatial 4", [*changes, GRAPHS], job, seed), plain, 0)
        except (AssertionError, RuntimeError, CommError):
            noticed = True
            break
    assert (noticed or "cudaErrorStreamCapture" in caplog.text) == (name is not None)
    assert name is not None or any(p.launches for p in programs)


def test_an_abort_lets_go_of_graphs(monkeypatch: pytest.MonkeyPatch, programs: list[Recorded]) -> None:
    """Since the end of a communicator waits for them, also where it is aborted."""

    def job(trainer: Trainer) -> list[dict[str, Any]]:
        records = list(trainer.train())
        transport: Any = trainer.transport
        comms = [*transport._comms.values()]
        assert any(comm.graphs for comm in comms)
        for abort in transport.aborts():
            abort()
        assert not any(comm.graphs for comm in comms)
        return records

    trained(monkeypatch, "mixed 4", [GRAPHS], job)
    assert any(p.launches for p in programs)
