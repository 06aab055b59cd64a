"""How ranks with GPUs choose their transport, and what they are told."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Any

import pytest

from lbpar.config.engine import EngineConfig
from lbpar.errors import CommError
from lbpar.layout.grid import Grid
from lbpar.train.devices import choice, over_devices
from lbpar.transport.nccl import NcclTransport
from lbpar.transport.virtual import VirtualWorld
from tests.util import fake_cupy


def facts(*places: str, missing: str = "") -> list[dict[str, str]]:
    return [{"place": p, "missing": missing if r == 1 else ""} for r, p in enumerate(places)]


def test_nccl_where_each_rank_has_a_device() -> None:
    for wanted in ("auto", "nccl"):
        assert choice(wanted, facts("a 0", "a 1", "b 0")) == ("nccl", "each rank has a GPU of its own")
    assert choice("host", facts("a 0", "a 1"))[0] == "host"


def test_ranks_that_share_a_device_go_by_way_of_the_host(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choice("auto", facts("a 0", "a 1", "a 0")) == (
            "host",
            "ranks [0, 2] share the GPU a 0, which NCCL does not allow",
        )
    assert "ranks [0, 2] share the GPU a 0 and take turns on it" in caplog.text
    with pytest.raises(
        CommError,
        match=r"engine\.transport: nccl cannot be used: ranks \[0, 2\] share the GPU a 0.*one process for each GPU",
    ):
        choice("nccl", facts("a 0", "a 1", "a 0"))


def test_without_nccl_or_device_the_rank_is_named() -> None:
    assert choice("auto", facts("a 0", "a 1", missing="no libnccl")) == ("host", "rank 1: no libnccl")
    assert choice("auto", facts("", "", missing="no driver"))[1] == "rank 1: no driver"
    with pytest.raises(CommError, match="nccl cannot be used: rank 1: no libnccl"):
        choice("nccl", facts("a 0", "a 1", missing="no libnccl"))


def test_ranks_take_the_devices_of_their_node_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the launcher's number of a rank on its node; two ranks on two devices then connect by NCCL."""
    fake_cupy.install(monkeypatch, devices=2)

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


def test_other_engines_keep_their_transport() -> None:
    world = VirtualWorld(Grid((2,)))
    assert over_devices(world.transport(0), EngineConfig(name="numpy")) is world.transport(0)


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
    assert seen == ["the GPU"] * 2
