"""A training run on the engine `cupy` with checkpoint and resume, on the stand-in for CuPy, equals that on NumPy."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.engine.cupy.device import CupyDevice
from lbpar.engine.cupy.graphs import Graphs
from lbpar.engine.cupy.plans import OURS, Choice, Plan
from lbpar.train.trainer import Trainer
from tests.checkpoint.test_saving import first_part, rest
from tests.cuda.emulator import compiler_found
from tests.util import fake_cublas, fake_cudnn, fake_cupy
from tests.util.training import PLANS, Ran, assert_same, run_file, train

pytestmark = pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
CUPY = "engine.name=cupy"


@pytest.mark.parametrize("engines", [(CUPY, CUPY), ("engine.name=numpy", CUPY)], ids=["cupy", "numpy, then cupy"])
def test_a_run_with_checkpoint_and_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engines: tuple[str, str]
) -> None:
    machine = fake_cupy.install(monkeypatch)
    fake_cupy.few_kernels(monkeypatch, 8)
    machine.scheduler.seed(1)
    changes = ["train.epochs=2", "data.samples=14", "train.clip_norm=0.5", "data.augment.flip=[W]"]
    whole = train(run_file(changes))
    one = train(run_file([*changes, engines[0], *PLANS["mixed 4"][1]]), 4, first_part(tmp_path, 1))
    two = train(run_file([*changes, engines[1], *PLANS["data 2"][1]]), 2, rest(tmp_path))
    assert_same(Ran(one.records + two.records, two.tensors), whole)


def test_training_with_cudnn_and_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cudnn, "executed", [])
    monkeypatch.setattr(fake_cublas, "executed", [])
    fake_cupy.install(monkeypatch, cudnn=fake_cudnn, cublas=fake_cublas).scheduler.seed(2)
    fake_cupy.few_kernels(monkeypatch, 4)
    changes = ["engine.dtype=float32", "train.epochs=2", "data.samples=14"]
    whole = train(run_file(changes))
    split = train(run_file([*changes, CUPY, "engine.cudnn=true", *PLANS["mixed 4"][1]]), 4)
    assert [r["loss"] for r in split.records] == pytest.approx([r["loss"] for r in whole.records], rel=1e-4)
    assert {ran for ran, _ in fake_cudnn.executed} == {"fprop", "dgrad", "wgrad"}  # whose batch norms are split
    assert len(fake_cublas.executed) == 4 * (2 * 2 * 3 + 2 * 2)  # ranks, epochs, batches, passes; and two evaluations


@pytest.mark.parametrize("more", [[], ["train.accumulate=2"], ["engine.autotune=true"]], ids=str)
def test_training_with_batch_norms_by_cudnn(monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    monkeypatch.setattr(fake_cudnn, "executed", [])
    fake_cupy.install(monkeypatch, cudnn=fake_cudnn).scheduler.seed(4)
    fake_cupy.few_kernels(monkeypatch, 4)
    changes = ["engine.dtype=float32", "train.epochs=2", "data.samples=14"]
    whole = train(run_file([*changes, *(m for m in more if m.startswith("train"))]))
    alone = train(run_file([*changes, CUPY, "engine.cudnn=true", *more]))
    assert [r["loss"] for r in alone.records] == pytest.approx([r["loss"] for r in whole.records], rel=1e-4)
    for name, array in whole.tensors.items():
        np.testing.assert_allclose(alone.tensors[name], array, rtol=1e-3, atol=1e-4, err_msg=name)
    assert "batchnorm" in {ran for ran, _ in fake_cudnn.executed}


def test_replicas_stay_equal_with_timed_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that compute the same find different plans fastest: they take one together, or their weights would drift apart."""
    monkeypatch.setattr(fake_cudnn, "executed", [])
    fake_cupy.install(monkeypatch, cudnn=fake_cudnn).scheduler.seed(3)
    fake_cupy.few_kernels(monkeypatch, 4)

    def timed(graphs: Graphs, plan: Plan, *_: Any) -> dict[Choice, float]:
        rank = int(threading.current_thread().name.removeprefix("rank "))
        best, seconds = ((OURS, 1.0), (plan.candidates[0], 1.5))[rank]
        return {choice: seconds if choice == best else 2.0 for choice in plan.candidates}

    monkeypatch.setattr(Graphs, "_timed", timed)
    changes = ["engine.dtype=float32", "train.epochs=1", "data.samples=16", CUPY, "engine.autotune=true"]
    idle = [*changes, "parallel.strategy=data", "parallel.layers={conv1: {N: 1}, conv2: {N: 1}}"]
    train(run_file(idle), 2)  # which compares replicas
    assert (
        sum(name != "batchnorm" for name, _ in fake_cudnn.executed) == 2 * 5
    )  # two forward, two of weights, one of data, in the first of two steps; our kernels then
    choose = Graphs.choose
    monkeypatch.setattr(Graphs, "choose", lambda graphs, found: choose(graphs, [graphs.times]))
    with pytest.raises(AssertionError, match="replicas differ"):
        train(run_file(idle), 2)


@pytest.mark.parametrize(("procs", "dtype"), [(1, "float32"), (2, "float32"), (1, "bfloat16")])
def test_training_takes_the_stretch_of_memory_that_was_foretold(
    monkeypatch: pytest.MonkeyPatch, procs: int, dtype: str
) -> None:
    """And no more, however many steps follow."""
    fake_cupy.install(monkeypatch)
    fake_cupy.few_kernels(monkeypatch, 2 if dtype == "bfloat16" else 4)
    reserve, stretches, most = CupyDevice.reserve, list[tuple[CupyDevice, int]](), 1 << 10

    def noted(self: CupyDevice, nbytes: int) -> None:
        reserve(self, nbytes)
        stretches.append((self, nbytes))

    monkeypatch.setattr(CupyDevice, "reserve", noted)
    changes = [
        CUPY,
        f"engine.dtype={dtype}",
        "model.input=[64, 64, 2]",
        "data.samples=8",
        "train={batch: 4, epochs: 2}",
    ]
    train(run_file([*changes, "parallel.strategy=spatial"]), procs)
    assert len(stretches) == procs
    for device, nbytes in stretches:
        assert nbytes <= device.pool.total_bytes() < nbytes + most  # rounded up
        assert device.pool.used_bytes() < nbytes // 2


def test_training_in_bfloat16_learns_as_in_float64(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its checkpoint holds float32, with which NumPy goes on."""
    fake_cupy.install(monkeypatch)
    fake_cupy.few_kernels(monkeypatch, 2)
    changes = ["train.epochs=3", "data.samples=14"]
    whole = train(run_file(changes))
    one = train(run_file([*changes, CUPY, "engine.dtype=bfloat16"]), 1, first_part(tmp_path, 2))
    two = train(run_file([*changes, "engine.dtype=float32"]), 1, rest(tmp_path))
    for ours, exact in zip(one.records + two.records, whole.records, strict=True):
        assert ours["loss"] == pytest.approx(exact["loss"], rel=0.03)


@pytest.mark.parametrize(
    ("changes", "reads"),
    [([], 2), (["train.clip_norm=0.5"], 3), (["engine.dtype=float16", "train.loss_scale={start: 1024}"], 3)],
    ids=["loss and hits", "norm of gradients", "is all finite"],
)
def test_what_the_host_reads_of_a_step(monkeypatch: pytest.MonkeyPatch, changes: list[str], reads: int) -> None:
    fake_cupy.install(monkeypatch)
    fake_cupy.few_kernels(monkeypatch, 2 if "engine.dtype=float16" in changes else 8)
    fetch, step, count, counts = CupyDevice.fetch, Trainer._step, [0], list[int]()

    def counted(self: CupyDevice, a: Any) -> Any:
        count[0] += 1
        return fetch(self, a)

    def whole(self: Trainer, *args: Any) -> Any:
        before = count[0]
        result = step(self, *args)
        counts.append(count[0] - before)
        return result

    monkeypatch.setattr(CupyDevice, "fetch", counted)
    monkeypatch.setattr(Trainer, "_step", whole)
    train(run_file([CUPY, "train.epochs=1", *changes]))
    assert counts == [reads] * 3
