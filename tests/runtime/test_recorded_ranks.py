"""Steps of several ranks that are recorded with their moves by NCCL, on the stand-in for CuPy: the bits of steps that are not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lbpar.config.engine import EngineConfig
from lbpar.engine.cupy.device import CupyDevice
from lbpar.engine.registry import get_engine
from lbpar.errors import ConfigError, EngineError
from lbpar.layout.grid import Grid
from lbpar.runtime import devices
from lbpar.runtime.devices import over_devices
from lbpar.runtime.recorded import Recorded
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.checked import CheckedTransport
from lbpar.transport.nccl import NcclTransport
from lbpar.transport.probe import Found
from lbpar.transport.virtual import VirtualWorld
from tests.cuda.emulator import compiler_found
from tests.util import fake_cupy
from tests.util.nccl_ranks import CHANGES, GRAPHS, World, noted_programs, trained
from tests.util.training import PLANS, assert_same, loaded_again, run_file
from tests.util.two_steps import CASES, Training, assert_equal

needs_compiler = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
BFLOAT16 = ["engine.dtype=bfloat16"]
FLOAT16 = ["engine.dtype=float16", "train.loss_scale={start: 65536, interval: 3}"]
ACCUMULATE = ["train.accumulate=2", "train.epochs=6"]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    return noted_programs(monkeypatch)


@needs_compiler
@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        *((plan, []) for plan in PLANS),
        ("mixed 4", BFLOAT16),
        pytest.param("spatial 4", BFLOAT16, marks=pytest.mark.slow),
        ("data 3", FLOAT16),
        pytest.param("mixed 6", FLOAT16, marks=pytest.mark.slow),
        ("data 2", ACCUMULATE),
        ("mixed 4", ACCUMULATE),
        pytest.param("mixed 6", [*ACCUMULATE, *FLOAT16], marks=pytest.mark.slow),
        ("mixed 4", ["train.clip_norm=0.5", "engine.progress=block"]),
        ("mixed 4", ["engine.progress=thread"]),
    ],
    ids=str,
)
def test_the_same_bits_and_messages(
    monkeypatch: pytest.MonkeyPatch, programs: list[Recorded], plan: str, changes: Sequence[str]
) -> None:
    sent: list[dict[int, Any]] = [{}, {}]

    def job(trainer: Trainer) -> list[dict[str, Any]]:
        records = list(trainer.train())
        sent[bool(programs)][trainer.transport.rank] = trainer.transport.counter.items()
        trainer.transport.disconnect()  # the stand-in's NCCL refuses to go where graphs are left
        return records

    plain, *recorded = (
        trained(monkeypatch, plan, [*changes, *options], job, seed)
        for seed, options in enumerate([[], [GRAPHS], [GRAPHS]])
    )
    for ran in recorded:
        assert_same(ran, plain, 0)
    assert sent[0] == sent[1]
    assert any(p.launches for p in programs) and not any(p._refused for p in programs)


@needs_compiler
@pytest.mark.parametrize(
    ("case", "procs", "dtype"),
    [
        pytest.param("residual", 4, "float64", marks=pytest.mark.slow),
        ("segmentation", 3, "float64"),
        ("segmentation", 6, "float32"),
        ("segmentation", 4, "bfloat16"),
        ("grouped", 2, "float32"),
        ("grouped", 6, "bfloat16"),
        ("regression", 3, "float64"),
        ("classifier", 5, "float32"),
        pytest.param("shared", 4, "float64", marks=pytest.mark.slow),
    ],
)
def test_networks_under_random_plans(
    monkeypatch: pytest.MonkeyPatch, programs: list[Recorded], case: str, procs: int, dtype: str
) -> None:
    def training(graphs: bool) -> Training:
        fake_cupy.install(monkeypatch)
        fake_cupy.few_kernels(monkeypatch, {"float64": 8, "float32": 4}.get(dtype, 2))
        engines: list[Any] = [get_engine("cupy", dtype, graphs=graphs) for _ in range(procs)]
        world = World(VirtualWorld(Grid.of(procs)), engines)
        return Training(replace(CASES[case], types=dtype), procs, world, engines)

    want, recorded = training(False).run(), training(True)
    for seed in range(5):
        fake_cupy.machine().scheduler.seed(seed)
        assert_equal(recorded.run(), want)
    assert len(programs) == procs * CASES[case].micro and all(p.launches for p in programs)


@needs_compiler
def test_weights_that_are_loaded_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, programs: list[Recorded]
) -> None:
    """Also by a trainer that goes on from there, whose steps are recorded anew."""

    def resume(trainer: Trainer) -> list[dict[str, Any]]:
        trainer.load(tmp_path)
        return list(trainer.train())

    ran = [
        trained(monkeypatch, "mixed 4", ["train.epochs=6", *options], how)
        for options in ([], [GRAPHS])
        for how in (loaded_again(tmp_path), resume)
    ]
    assert_same(ran[2], ran[0], 0)
    assert_same(ran[3], ran[1], 0)
    assert ran[2].records[-2:] == [ran[2].records[-1]] * 2 and sum(p.launches > 0 for p in programs) > 8


@needs_compiler
@pytest.mark.parametrize("changes", [[], ACCUMULATE], ids=["reduce", "accumulate"])
@pytest.mark.parametrize("nth", [0, pytest.param(1, marks=pytest.mark.slow), 4])
def test_what_one_rank_cannot_record_no_rank_records(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    programs: list[Recorded],
    nth: int,
    changes: Sequence[str],
) -> None:
    """Whether it is the first of a run that cannot be recorded or a later one, for which moves are under way, and it fails behind its last move."""
    plain, capture, captures = trained(monkeypatch, "mixed 4", changes), CupyDevice.capture, list[int]()

    def failing(self: CupyDevice, run: Callable[[], None]) -> Any:
        def and_then() -> None:
            run()
            if threading.current_thread().name == "rank 1":
                captures.append(1)
                if len(captures) > nth:
                    raise EngineError("no more")

        return capture(self, and_then)

    monkeypatch.setattr(CupyDevice, "capture", failing)
    assert_same(trained(monkeypatch, "mixed 4", [*changes, GRAPHS]), plain, 0)
    assert "engine.graphs: steps are not recorded: rank 1: no more" in caplog.text and "rank 2" not in caplog.text
    first, *others = ([p._refused for p in programs if p._transport.rank == rank] for rank in range(4))
    assert any(first) and others == [first] * 3


def refused(world: VirtualWorld, match: str, plan: Any = None, **engine: Any) -> None:
    """By all ranks alike."""
    fake_cupy.between(world)

    def rank(t: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            over_devices(t, EngineConfig(name="cupy", graphs=True, **engine), plan)

    world.run(rank)


def test_moves_that_the_host_has_a_part_in_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of NCCL are not."""
    fake_cupy.install(monkeypatch, devices=2)

    def ranks(*places: str) -> VirtualWorld:
        monkeypatch.setattr(
            devices, "_facts", lambda: {"place": places[int(threading.current_thread().name[-1])], "missing": ""}
        )
        return VirtualWorld(Grid((2,)))

    found = Found(True, True, "two processes moved arrays")
    monkeypatch.setattr(devices, "cuda_aware", lambda: found)
    told = r"\): the host has a part in these moves, .* with engine.transport: nccl, or a single process, or leave out engine.graphs"
    by_host, shared = (
        "engine.graphs: true, but arrays travel by way of the host ",
        r"\(ranks \[0, 1\] share the GPU a, .*; ",
    )
    refused(ranks("a", "b"), by_host + r"\(as the run file says" + told, transport="host")
    refused(ranks("a", "b"), r"travel by way of MPI \(two processes moved arrays" + told, transport="mpi")
    refused(ranks("a", "a"), "travel by way of MPI " + shared + found.why + told)
    found = Found(False, False, "it was built without")
    refused(ranks("a", "a"), by_host + shared + found.why + told)
    with pytest.raises(ConfigError, match=by_host + r"\(LBPAR_CHECKED=1 compares"):
        over_devices(CheckedTransport(ranks("a", "b").transport(0)), EngineConfig(name="cupy", graphs=True))
    world = ranks("a", "b")
    fake_cupy.between(world)
    made = world.run(lambda t: over_devices(t, EngineConfig(name="cupy", graphs=True)))
    assert [type(t) for t in made] == [NcclTransport] * 2


def test_stages_are_refused() -> None:
    config = run_file([*CHANGES, GRAPHS, "parallel.strategy=data", "parallel.stages=2"])
    plan = build_plan(config, build_graph(config), 2)
    match = r"engine.graphs: true with 2 stages: .* Leave out engine.graphs, or parallel.stages"
    refused(VirtualWorld(plan.grid), match, plan)
