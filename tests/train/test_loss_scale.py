"""Loss scaling changes no digit where nothing overflows; where something does, no rank changes anything and the scale falls."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.engine.registry import get_engine
from lbpar.errors import ConfigError
from lbpar.graph.ops.losses import LOSSES
from lbpar.train.trainer import Trainer
from tests.checkpoint.test_saving import first_part, rest
from tests.cuda.emulator import compiler_found
from tests.util import fake_cupy
from tests.util.training import PLANS, Ran, assert_same, run_file, train

SHORT = ["train.epochs=2", "data.samples=14"]
HUGE = "train.loss_scale={start: 1e40, most: 1e40}"
"""Gradients of float32 overflow for a few steps."""

LOSS_CHANGES = {
    "cross_entropy": [],
    "smoothed": ["train.label_smoothing=0.1"],
    "weighed": ["train.loss={name: cross_entropy, class_weights: [1, 2, 3, 1, 1, 1, 1]}"],
    "focal": ["train.loss={name: focal}"],
    "dice": ["train.loss=dice"],
    "regions": ["train.loss={name: dice, background: false}"],
    "dice_cross_entropy": ["train.loss={name: dice_cross_entropy}"],
    "mse": ["train.loss=mse"],
    "l1": ["train.loss=l1"],
    "huber": ["train.loss=huber"],
    "bce": ["train.loss=bce"],
}


@pytest.mark.parametrize("loss", LOSS_CHANGES)
@pytest.mark.parametrize("plan", [(1, []), PLANS["mixed 4"]], ids=["1", "4"])
def test_a_power_of_two_changes_no_bit(loss: str, plan: Any) -> None:
    procs, parallel = plan
    changes = [*SHORT, *LOSS_CHANGES[loss], *parallel, "train.clip_norm=0.5"]
    plain, scaled = (train(run_file([*changes, *more]), procs) for more in ([], ["train.loss_scale={start: 1024}"]))
    assert [r.pop("loss_scale") for r in scaled.records] == [1024] * 2
    assert [r.pop("skipped") for r in scaled.records] == [0] * 2
    assert scaled.records == plain.records
    for name, array in plain.tensors.items():
        np.testing.assert_array_equal(scaled.tensors[name], array)


def test_every_loss_is_tried() -> None:
    assert set(LOSSES) <= set(LOSS_CHANGES)


@pytest.mark.parametrize("plan", ["1", "data 2", "data 3", "spatial 4", "filter 3", "mixed 4"])
def test_an_update_that_overflows_is_left_out_on_all_ranks(plan: str) -> None:
    procs, parallel = PLANS.get(plan, (1, []))
    seen: list[dict[str, Any]] = []

    def job(trainer: Trainer) -> list[dict[str, Any]]:
        scales, states = [], []

        def look(result: Any, lr: float) -> None:
            assert trainer.scaler is not None
            scales.append(trainer.scaler.scale)
            learned = {n for n, p in trainer.worker.params.items() if p.kind != "statistic"}
            states.append({n: trainer.engine.to_host(trainer.worker.state[n]).copy() for n in learned})
            states[-1] |= {n: trainer.engine.to_host(a).copy() for n, a in trainer.optimizer.state_dict().items()}

        look(None, 0.0)
        records = []
        while not trainer.done:
            records.append(trainer.train_epoch(look))
        same = [all(a[n].tobytes() == b[n].tobytes() for n in a) for a, b in itertools.pairwise(states)]
        skips = [after < before for before, after in itertools.pairwise(scales)]
        assert any(skips) and not all(skips)
        assert all(s or not k for s, k in zip(same, skips, strict=True)), "a skipped update changed something"
        assert all(after == before / 2 for before, after, k in zip(scales[:-1], scales[1:], skips, strict=True) if k)
        assert trainer.optimizer.steps == skips.count(False)
        seen.append({"scales": scales, "records": records})
        return records

    changes = [*SHORT, "train.epochs=6", "engine.dtype=float32", "train.optimizer={name: adam, lr: 0.01}", HUGE]
    ran = train(run_file([*changes, *parallel]), procs, job)
    assert ran.records[-1]["skipped"] > 0
    assert all(s["scales"] == seen[0]["scales"] for s in seen)


def test_the_scale_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    changes = ["train.epochs=4", "data.samples=14", "engine.dtype=float32", HUGE]
    whole = train(run_file(changes))
    one = train(run_file([*changes, *PLANS["data 2"][1]]), 2, first_part(tmp_path, 2))
    two = train(run_file([*changes, *PLANS["filter 3"][1]]), 3, rest(tmp_path))
    assert one.records[-1]["skipped"] > 0
    assert_same(Ran(one.records + two.records, two.tensors), whole, 1e-3)


@pytest.mark.parametrize("engine", ["numpy", "onednn"])
def test_float16_is_for_gpus(engine: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"float16 is not available on engine\.name: {engine}; choose engine\.name: cupy"
    ):
        get_engine(engine, "float16")


@pytest.mark.skipif(not compiler_found(), reason="needs a C++ compiler")
@pytest.mark.parametrize("plan", ["1", "data 2", "filter 3", "mixed 4"])
def test_float16_learns_as_float64(monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    procs, parallel = PLANS.get(plan, (1, []))
    fake_cupy.install(monkeypatch)
    fake_cupy.few_kernels(monkeypatch, 2)
    whole = train(run_file(SHORT))
    # The first updates overflow: 2**15 is half of what float16 holds.
    half = [
        *SHORT,
        "engine.name=cupy",
        "engine.dtype=float16",
        "train.loss_scale={start: 65536, interval: 3}",
        *parallel,
    ]
    ran = train(run_file(half), procs, check_float32)
    for got, want in zip(ran.records, whole.records, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=0.02)


def check_float32(trainer: Trainer) -> list[dict[str, Any]]:
    assert trainer.scaler is not None and trainer.engine.activations == np.float16
    records = list(trainer.train())
    assert {a.dtype for a in trainer.worker.state.values()} <= {np.dtype("float32"), np.dtype("float64")}
    return records
