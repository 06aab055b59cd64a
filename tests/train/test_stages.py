"""Training with stages: the run of one rank with the same micro-batches, through checkpoints, evaluation and prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar.errors import ConfigError, LbparError
from lbpar.train.predict import predict
from lbpar.train.trainer import Trainer
from tests.util.training import Ran, assert_same, run_file, train

BASE = ["parallel.strategy=data", "parallel.micro_batches=3"]  # of 8, 8 and 6 samples
OPTIMIZERS = "train.optimizer={name: lars, lr: 0.05, momentum: 0.9}"
CASES = {
    "two stages": (2, ["parallel.stages=2"]),
    "four stages": (4, ["parallel.stages=4", "parallel.schedule=gpipe"]),
    "two stages of two": (4, ["parallel.stages=2", "parallel.schedule=zero-bubble"]),
    "three stages of two": (6, ["parallel.stages=3", "parallel.strategy=spatial"]),
    "two places with two stages each": (2, ["parallel.stages=2", "parallel.schedule=interleaved"]),
    "chosen grids": (4, ["parallel.stages=2", "parallel.strategy=auto", "machine=laptop"]),
    "given layers": (2, ["parallel.stages=2", "parallel.stage={conv2: 0, fc: 1}"]),
    "accumulated": (2, ["parallel.stages=2", "train.accumulate=2"]),
    "clipped": (4, ["parallel.stages=2", "train.clip_norm=0.1", OPTIMIZERS]),
}


@pytest.mark.parametrize(("procs", "changes"), CASES.values(), ids=CASES.keys())
def test_a_run_with_stages_is_the_run_of_one_rank(procs: int, changes: list[str]) -> None:
    same = [c for c in changes if c.startswith("train.")]
    assert_same(train(run_file([*BASE, *changes]), procs), train(run_file([*BASE, *same])))


def test_one_micro_batch_has_statistics_of_the_whole_batch() -> None:
    """Then norms are those of a run without stages; those of parts are others."""
    whole = train(run_file([]))
    assert_same(train(run_file(["parallel.stages=2", "parallel.micro_batches=1", "parallel.strategy=data"]), 4), whole)
    parts = train(run_file(BASE))
    name = next(n for n in whole.tensors if n.endswith("running_var"))
    assert np.abs(parts.tensors[name] - whole.tensors[name]).max() > 1e-3


def test_a_run_goes_on_with_another_number_of_stages(tmp_path: Path) -> None:
    want = train(run_file(BASE))

    def first(trainer: Trainer) -> list[dict[str, Any]]:
        out = [trainer.train_epoch()]
        trainer.save(tmp_path)
        return out

    def then(trainer: Trainer) -> list[dict[str, Any]]:
        assert trainer.resume(tmp_path)
        out = [trainer.train_epoch()]
        trainer.save(tmp_path)
        return out

    records = train(run_file([*BASE, "parallel.stages=3"]), 3, first).records
    records += train(run_file([*BASE, "parallel.stages=2"]), 4, then).records
    last = train(run_file(BASE), 1, then)
    assert_same(Ran(records + last.records, last.tensors), want)


def test_predictions_are_those_of_one_rank() -> None:
    def job(trainer: Trainer) -> list[dict[str, Any]]:
        trainer.train_epoch()
        found.append(predict(trainer.worker, trainer.dataset, 8)[trainer.graph.output])
        return []

    found: list[np.ndarray] = []
    train(run_file(BASE), 1, job)
    train(run_file([*BASE, "parallel.stages=2"]), 4, job)
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-9, atol=1e-12)


WRONG = {
    "stages: 3 of 4 processes": (4, ["parallel.stages=3"], "does not divide 4 processes"),
    "more stages than layers": (16, ["parallel.stages=16"], "11 layers"),
    "more parts than samples": (2, ["parallel.stages=2", "parallel.micro_batches=9"], "expected at most 8"),
    "a stage that is not there": (2, ["parallel.stages=2", "parallel.stage={fc: 2}"], "expected 0 to 1"),
    "backwards": (2, ["parallel.stages=2", "parallel.stage={conv1: 1, fc: 0}"], "must not decrease"),
    "an unknown layer": (2, ["parallel.stages=2", "parallel.stage={fcc: 1}"], "did you mean"),
    "interleave alone": (2, ["parallel.stages=2", "parallel.interleave=2"], "only interleaved"),
}


@pytest.mark.parametrize(("procs", "changes", "message"), WRONG.values(), ids=WRONG.keys())
def test_bad_stages_are_refused(procs: int, changes: list[str], message: str) -> None:
    with pytest.raises(LbparError, match=message):
        train(run_file([BASE[0], *changes]), procs)


def test_norms_want_two_values_of_each_part() -> None:
    text = "model={input: [4], layers: [{op: linear, features: 3}, {op: norm, name: n}, {op: linear, features: 2}]}"
    with pytest.raises(ConfigError, match=r"n: a part \(8 micro-batches\) of a batch"):
        train(run_file(["parallel.stages=1", "parallel.micro_batches=8", text]))
