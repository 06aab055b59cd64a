"""A run that saved in the middle of an epoch goes on as if nothing had happened, to the last bit."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.checkpoint import saving
from lbpar.checkpoint.files import list_checkpoints, open_checkpoint, write_checkpoint
from lbpar.errors import CheckpointError, ConfigError
from lbpar.layout.grid import Grid
from lbpar.train import saver
from lbpar.train.job import run, start
from lbpar.train.saver import Saver
from lbpar.train.trainer import Trainer
from lbpar.transport.base import Transport
from lbpar.transport.stop import STOPPED
from lbpar.transport.virtual import VirtualWorld
from tests.util.training import PLANS, measured, run_file, whole

pytest.importorskip("h5py")

Stop = Callable[[Transport], str | None]


def job(out: Path, fields: list[str], plan: str = "data 2", resume: bool = False, stop: Stop = lambda t: None) -> Any:
    """Run on virtual ranks; the trainers and whether all ranks were stopped alike."""
    procs, parallel = PLANS[plan] if plan else (1, [])
    config = run_file([f"run.out={out}", "run.progress=none", *parallel, *fields])

    def rank(transport: Transport) -> tuple[Trainer, int | None]:
        trainer, goes_on = start(config, transport=transport, resume=resume)
        try:
            run(trainer, goes_on, 0.0, stop=lambda: stop(transport))
        except SystemExit as end:
            return trainer, end.code
        return trainer, None

    world = VirtualWorld(Grid.of(procs))
    ran = world.run(rank)
    world.check_idle()
    (code,) = {code for _, code in ran}
    return [trainer for trainer, _ in ran], code


def tensors(path: Path) -> dict[str, bytes]:
    """Contents of a checkpoint."""
    with open_checkpoint(path) as saved:
        return {n: saved.read(n, tuple(((0, k),) for k in s)).tobytes() for n, (s, _) in saved.tensors.items()}


def records(out: Path) -> list[dict[str, Any]]:
    return [measured(json.loads(line)) for line in (out / "metrics.jsonl").read_text().splitlines()]


def same(got: list[Trainer], want: list[Trainer]) -> None:
    ours, theirs = whole(got), whole(want)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    assert got[0].micro == want[0].micro


def steps(out: Path) -> list[int]:
    return [int(p.name.partition("-")[2]) for p in list_checkpoints(out / "checkpoints")]


@pytest.fixture(autouse=True)
def every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks tell each other after each update, however fast they are."""
    monkeypatch.setattr(saver, "MOST_UPDATES", 1)


class After:
    """Rank 1 alone is asked to end, after so many updates (the end of an epoch counts as one more)."""

    def __init__(self, updates: int) -> None:
        self.left = updates

    def __call__(self, transport: Transport) -> str | None:
        if transport.rank != 1:
            return None
        self.left -= 1
        return "SIGUSR1" if self.left <= 0 else None


FIELDS: list[list[str]] = [[], ["train.accumulate=2", "train.batch=3", "train.epochs=2"], ["train.clip_norm=0.5"]]


@pytest.fixture(scope="module", params=FIELDS, ids=str)
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Fields of a run, its directory, its trainers."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    trainers, code = job(out, request.param)
    assert code is None
    return request.param, out, trainers


@pytest.mark.parametrize("after", [1, 2, 4])
def test_asked_to_end_after_any_update(after: int, uninterrupted: Any, tmp_path: Path) -> None:
    fields, out, trainers = uninterrupted
    stopped, code = job(tmp_path / "run", fields, stop=After(after))
    assert code == STOPPED and not stopped[0].done and stopped[0].between_updates
    assert steps(tmp_path / "run")[-1] == stopped[0].step
    resumed, code = job(tmp_path / "run", fields, resume=True)
    assert code is None
    same(resumed, trainers)
    assert records(tmp_path / "run") == records(out)


def test_the_end_of_an_epoch_is_saved_before_its_evaluation(tmp_path: Path) -> None:
    stopped, code = job(tmp_path / "run", [], stop=After(3))
    assert code == STOPPED and (stopped[0].epoch, stopped[0].batches, stopped[0].step) == (0, 3, 3)
    assert records(tmp_path / "run") == []


def test_a_run_that_is_done_ends_well_though_asked_to_end(tmp_path: Path) -> None:
    trainers, code = job(tmp_path / "run", ["train.epochs=1"], stop=After(3))
    assert code is None and trainers[0].done
    assert (tmp_path / "run" / "report.json").is_file() and len(records(tmp_path / "run")) == 1


@pytest.mark.parametrize("plan", ["data 3", "spatial 4"])
def test_it_goes_on_on_another_grid_in_the_middle_of_an_epoch(plan: str, uninterrupted: Any, tmp_path: Path) -> None:
    fields, out, trainers = uninterrupted
    job(tmp_path / "run", fields, stop=After(2))
    resumed, _ = job(tmp_path / "run", fields, plan=plan, resume=True)
    for name, array in whole(trainers).items():
        np.testing.assert_allclose(whole(resumed)[name], array, rtol=1e-9, atol=1e-9, err_msg=name)
    for got, want in zip(records(tmp_path / "run"), records(out), strict=True):
        assert got == pytest.approx(want, rel=1e-9)


def test_checkpoints_every_few_steps_and_epochs(tmp_path: Path) -> None:
    fields = ["run.checkpoint={every_epochs: 2, every_steps: 2, keep: 100}", "data.test=null"]
    job(tmp_path / "run", fields)
    assert steps(tmp_path / "run") == [2, 4, 6, 8, 9]


def test_each_of_them_is_a_place_to_go_on_from(uninterrupted: Any, tmp_path: Path) -> None:
    fields, out, trainers = uninterrupted
    job(tmp_path / "run", [*fields, "run.checkpoint={every_steps: 1, keep: 100}"])
    for path in reversed(list_checkpoints(tmp_path / "run" / "checkpoints")[:-1]):
        shutil.rmtree(path.with_name(f"step-{trainers[0].step:06d}"))
        resumed, _ = job(tmp_path / "run", fields + ["run.checkpoint.keep=100"], resume=True)
        same(resumed, trainers)
        assert records(tmp_path / "run") == records(out)
        shutil.rmtree(path)


def test_checkpoints_every_few_minutes_go_by_the_clock_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 10**6, 40))  # rank 0 looks once at the start, at each update and epoch, and after saving
    monkeypatch.setattr(saver, "perf_counter", lambda: float(next(now)))
    fields = ["run.checkpoint={every_epochs: 100, every_minutes: 1, keep: 100}", "data.test=null"]
    job(tmp_path / "run", fields, plan="")
    assert steps(tmp_path / "run") == [2, 3, 5, 6, 8, 9]


BACKGROUND = "run.checkpoint={every_steps: 2, background: true, keep: 100}"


@pytest.mark.parametrize("plan", ["", "data 2", "filter 3"])
def test_training_goes_on_while_a_copy_is_written(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(tmp_path / "a", ["run.checkpoint={every_steps: 2, keep: 100}"], plan=plan)
    went_on = threading.Event()
    waited = []

    def write(path: Path, *args: Any) -> None:
        if path.name == "step-000002":  # is written while the third step, which evaluates, changes all weights
            waited.append(went_on.wait(60))
        write_checkpoint(path, *args)

    real = Saver.after_epoch

    def after_epoch(own: Saver) -> None:
        went_on.set()
        real(own)

    monkeypatch.setattr(saving, "write_checkpoint", write)
    monkeypatch.setattr(Saver, "after_epoch", after_epoch)
    job(tmp_path / "b", [BACKGROUND], plan=plan)
    assert waited == [True]
    assert steps(tmp_path / "b") == steps(tmp_path / "a") == [2, 3, 4, 6, 8, 9]
    for ours, theirs in zip(*(list_checkpoints(tmp_path / name / "checkpoints") for name in "ba"), strict=True):
        assert tensors(ours) == tensors(theirs)


def test_a_run_that_is_asked_to_end_waits_for_what_is_being_written(uninterrupted: Any, tmp_path: Path) -> None:
    fields, out, trainers = uninterrupted
    _, code = job(tmp_path / "run", [*fields, BACKGROUND], stop=After(2))
    assert code == STOPPED
    resumed, _ = job(tmp_path / "run", [*fields, BACKGROUND], resume=True)
    same(resumed, trainers)
    assert records(tmp_path / "run") == records(out)


@pytest.mark.parametrize("step", [2, 9])
def test_what_cannot_be_written_ends_the_run_on_all_ranks(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, *args: Any) -> None:
        if path.name == f"step-{step:06d}":
            raise CheckpointError("the disk is full")
        write_checkpoint(path, *args)

    monkeypatch.setattr(saving, "write_checkpoint", write)
    with pytest.raises(CheckpointError, match="rank 0: the disk is full"):
        job(tmp_path / "run", [BACKGROUND])
    assert not any("checkpoint" in t.name for t in threading.enumerate())
    assert steps(tmp_path / "run") == [s for s in (2, 3, 4, 6, 8) if s < step]


def test_a_copy_that_does_not_fit_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "node_memory", lambda: 20_000)
    with pytest.raises(
        ConfigError, match="run.checkpoint.background: rank 0 would hold a copy of all ranks' state, 14.8 kB, "
    ):
        job(tmp_path / "run", [BACKGROUND])
    assert not (tmp_path / "run").exists()


DELAYED = ["parallel.stages=2", "parallel.schedule=delayed", "parallel.strategy=data", "data.samples=38"]


@pytest.mark.parametrize("fields", [[], ["run.checkpoint={every_steps: 3, keep: 9}"]], ids=["asked", "and every 3"])
def test_what_is_under_way_is_done_before_a_run_ends(fields: list[str], tmp_path: Path) -> None:
    """Asked to end after its second update, when a third batch is in the first stage: saved after the third."""
    fields = [*DELAYED, *(fields or ["run.checkpoint={keep: 9}"])]
    calls = {0: 0, 1: 0}

    def stop(transport: Transport) -> str | None:
        calls[transport.rank] += 1
        return "enough" if calls[transport.rank] == 2 else None

    trainers, code = job(tmp_path, fields, stop=stop)
    assert code == STOPPED and steps(tmp_path) == [3]
    assert all(t.step == 3 and not t.under_way for t in trainers)
    if "every_steps" in fields[-1]:  # which drains there in any case: the run is that which was not asked
        ended, _ = job(tmp_path, fields, resume=True)
        straight, _ = job(tmp_path / "straight", fields)
        same(ended, straight)
        assert steps(tmp_path / "straight") == [3, 5, 6, 9, 10, 12, 15]
