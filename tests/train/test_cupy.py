"""A training run on the engine `cupy` with checkpoint and resume, on the stand-in for CuPy, equals that on NumPy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.test_saving import first_part, rest
from tests.cuda.emulator import compiler_found
from tests.util import fake_cudnn, fake_cupy
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


def test_training_with_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cudnn, "executed", [])
    fake_cupy.install(monkeypatch, cudnn=fake_cudnn).scheduler.seed(2)
    fake_cupy.few_kernels(monkeypatch, 4)
    changes = ["engine.dtype=float32", "train.epochs=2", "data.samples=14"]
    whole = train(run_file(changes))
    split = train(run_file([*changes, CUPY, "engine.cudnn=true", *PLANS["mixed 4"][1]]), 4)
    assert [r["loss"] for r in split.records] == pytest.approx([r["loss"] for r in whole.records], rel=1e-4)
    assert {ran for ran, _ in fake_cudnn.executed} == {"fprop", "dgrad", "wgrad"}


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
