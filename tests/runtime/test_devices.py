"""How ranks with GPUs choose their transport, and what they are told."""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from lbpar.config.engine import EngineConfig
from lbpar.errors import CommError, ConfigError
from lbpar.layout.grid import Grid
from lbpar.runtime import devices
from lbpar.runtime.devices import choice, over_devices
from lbpar.transport import probe
from lbpar.transport.checked import CheckedTransport
from lbpar.transport.nccl import NcclTransport
from lbpar.transport.probe import Found
from lbpar.transport.virtual import VirtualWorld
from tests.util import fake_cupy


def facts(*places: str, missing: str = "") -> list[dict[str, str]]:
    return [{"place": p, "missing": missing if r == 1 else ""} for r, p in enumerate(places)]


def never() -> Found:
    raise AssertionError("nobody needs to know")


def no() -> Found:
    return Found(False, False, "it was built without")


def yes() -> Found:
    return Found(True, True, "two processes moved arrays")


def test_nccl_where_each_rank_has_a_device() -> None:
    for wanted in ("auto", "nccl"):
        assert choice(wanted, facts("a 0", "a 1", "b 0"), never) == ("nccl", "each rank has a GPU of its own")
    assert choice("host", facts("a 0", "a 1"), never)[0] == "host"


def test_ranks_that_share_a_device_go_by_way_of_the_host(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choice("auto", facts("a 0", "a 1", "a 0"), no) == (
            "host",
            "ranks [0, 2] share the GPU a 0, which NCCL does not allow; it was built without",
        )
        assert choice("auto", facts("a 0", "a 0"), yes)[0] == "mpi"
    assert "ranks [0, 2] share the GPU a 0 and take turns on it" in caplog.text
    with pytest.raises(
        CommError,
        match=r"engine\.transport: nccl cannot be used: ranks \[0, 2\] share the GPU a 0.*one process for each GPU",
    ):
        choice("nccl", facts("a 0", "a 1", "a 0"), never)


def test_without_nccl_or_device_the_rank_is_named() -> None:
    assert choice("auto", facts("a 0", "a 1", missing="no libnccl"), no) == (
        "host",
        "rank 1: no libnccl; it was built without",
    )
    assert choice("auto", facts("", "", missing="no driver"), never)[1] == "rank 1: no driver"
    with pytest.raises(CommError, match="nccl cannot be used: rank 1: no libnccl"):
        choice("nccl", facts("a 0", "a 1", missing="no libnccl"), never)


def test_an_mpi_that_takes_device_memory_can_be_asked_for() -> None:
    assert choice("mpi", facts("a 0", "a 1"), yes) == ("mpi", "two processes moved arrays")
    with pytest.raises(CommError, match=r"engine\.transport: mpi cannot be used: it was built without\. Load an MPI"):
        choice("mpi", facts("a 0", "a 1"), no)


def test_what_the_mpi_library_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, **functions: Any) -> None:
            self.__dict__.update(functions)

    def gpu(answer: int, failed: int = 0) -> Any:
        def query(kind: int, to: Any) -> int:
            to._obj.value = answer
            return failed

        return query

    for library, said in [
        (Library(MPIX_Query_cuda_support=lambda: 0), False),
        (Library(MPIX_Query_cuda_support=lambda: 1), True),
        (Library(MPIX_GPU_query_support=gpu(1)), True),
        (Library(MPIX_GPU_query_support=gpu(0)), False),
        (Library(MPIX_GPU_query_support=gpu(1, failed=13)), None),
        (Library(), None),
    ]:
        monkeypatch.setattr(probe, "load_mpi", lambda: Library(__file__="libmpi"))
        monkeypatch.setattr(probe.ctypes, "CDLL", lambda _, library=library: library)
        assert probe._library_says() is said


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


@pytest.mark.parametrize(
    ("child", "aware", "nonblocking", "why"),
    [
        (
            python("print('moved'); print('nonblocking')"),
            True,
            True,
            "a process and itself of a try moved arrays of a device",
        ),
        (python("import time; time.sleep(60); print('moved')"), False, False, "did not end within 3 s"),
        (python("import os; os.abort()"), False, False, "a process and itself of a try ended with signal 6"),
        (python("raise SystemExit(3)"), False, False, "ended with status 3"),
        (python(""), False, False, "said nothing"),
        (python("print('moved'); print('nonblocking'); raise SystemExit(3)"), False, False, "ended with status 3"),
        (("no such file",), False, False, "could not be started"),
        # only sums that run beside the host cannot be used
        (
            python("print('moved', flush=True); import time; time.sleep(60)"),
            True,
            False,
            "moved arrays of a device, but did not end within 3 s in sums beside the host",
        ),
        (
            python("print('moved', flush=True); import os; os.abort()"),
            True,
            False,
            "but ended with signal 6 in sums beside the host",
        ),
    ],
)
def test_a_try_may_crash_or_hang(
    monkeypatch: pytest.MonkeyPatch, child: tuple[str, ...], aware: bool, nonblocking: bool, why: str
) -> None:
    monkeypatch.setattr(probe, "CHILD", child)
    monkeypatch.setattr(probe, "SECONDS", 3.0 if "sleep" in str(child) else 20.0)
    monkeypatch.setattr(probe, "_mpirun", list)
    monkeypatch.setattr(probe, "_library_says", lambda: True)
    found = probe.cuda_aware()
    assert (found.aware, found.nonblocking) == (aware, nonblocking) and why in found.why
    monkeypatch.setattr(probe, "_library_says", lambda: False)
    assert probe.cuda_aware() == Found(False, False, "the MPI library says that it was built without CUDA")


def test_a_try_by_two_processes_on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from inside a job, whose variables they must not inherit."""
    pytest.importorskip("mpi4py")
    if not probe._mpirun():
        pytest.skip("no mpirun")
    monkeypatch.setattr(probe, "CHILD", (sys.executable, "-m", "tests.util.on_stand_in", "lbpar.transport.probe"))
    monkeypatch.setattr(probe, "_library_says", lambda: None)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "5")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    found = probe.cuda_aware()
    assert found == Found(
        True, True, "two processes of a try moved arrays of a device, though the library does not say so"
    )


def test_ranks_take_the_devices_of_their_node_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launcher's number of a rank on its node; two ranks on two devices then connect by NCCL."""
    fake_cupy.install(monkeypatch, devices=2)
    monkeypatch.setattr(devices, "cuda_aware", no)

    def kind(variable: str, numbers: list[str]) -> list[type]:
        world = VirtualWorld(Grid((2,)))
        fake_cupy.between(world)

        def rank(t: Any) -> type:
            monkeypatch.setenv(variable, numbers[t.rank])
            return type(over_devices(t, EngineConfig(name="cupy")))

        return world.run(rank)

    for variable in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        assert kind(variable, ["0", "1"]) == [NcclTransport] * 2
        assert NcclTransport not in kind(variable, ["0", "2"])  # which is device 0 once more
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("call", ["get_unique_id", "NcclCommunicator"])
def test_where_nccl_cannot_connect_all_ranks_go_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: int, call: str
) -> None:
    fake_cupy.install(monkeypatch, devices=2)
    monkeypatch.setattr(devices, "cuda_aware", no)
    monkeypatch.setattr(devices, "_facts", lambda: {"place": f"a {local()}", "missing": ""})
    nccl, aborted = fake_cupy.nccl, list[int]()

    def local() -> int:
        return int(threading.current_thread().name.removeprefix("rank "))

    def call_of_nccl(*args: Any) -> Any:
        if local() == (0 if call == "get_unique_id" else failing):
            raise nccl.NcclError("NCCL_ERROR_SYSTEM_ERROR")
        return SimpleNamespace(abort=lambda: aborted.append(local()))

    monkeypatch.setattr(nccl, call, call_of_nccl)
    if call == "get_unique_id":
        monkeypatch.setattr(nccl, "NcclCommunicator", never)

    def kinds(wanted: Any) -> list[str]:
        return VirtualWorld(Grid((2,))).run(lambda t: over_devices(t, EngineConfig(name="cupy", transport=wanted)).name)

    assert kinds("auto") == ["virtual"] * 2
    said = f"on rank {0 if call == 'get_unique_id' else failing}, connecting all ranks: NCCL reports NCCL_ERROR_SYSTEM_ERROR"
    assert "transport: host, because NCCL cannot be used (" + said in caplog.text
    assert aborted == ([] if call == "get_unique_id" else [1 - failing])
    with pytest.raises(CommError, match=said):
        kinds("nccl")


def test_other_engines_keep_their_transport() -> None:
    world = VirtualWorld(Grid((2,)))
    assert over_devices(world.transport(0), EngineConfig(name="numpy")) is world.transport(0)


def test_the_checked_mode_goes_by_way_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch, devices=2)
    checked = CheckedTransport(VirtualWorld(Grid((2,))).transport(0))
    assert over_devices(checked, EngineConfig(name="cupy")) is checked
    with pytest.raises(ConfigError, match=r"engine\.transport: nccl with LBPAR_CHECKED=1"):
        over_devices(checked, EngineConfig(name="cupy", transport="nccl"))


def test_the_watch_knows_who_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)
    from lbpar.engine.registry import get_engine

    transport, engine, seen = VirtualWorld(Grid()).transport(0), get_engine("cupy"), list[str]()

    @contextmanager
    def waiting(what: str) -> Any:
        seen.append(what)
        yield

    transport.waiting = waiting  # type: ignore[method-assign,assignment]
    NcclTransport(transport).attach(engine)
    engine.to_host(engine.zeros((3,)))
    engine.synchronize()
    assert seen == ["NCCL, all ranks to connect", "the GPU", "the GPU"]
