"""The best weights outlive newer ones and can be named; a rate that jumps on resume is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbpar import api
from lbpar.checkpoint.find import find_checkpoint
from lbpar.errors import CheckpointError
from lbpar.train.best import Best
from lbpar.train.setup import build_graph, build_plan, connect_to
from lbpar.train.trainer import Trainer
from tests.util.training import run_file

ACCURACIES = [0.1, 0.9, 0.5, 0.4, float("nan"), 0.9, 0.2]
"""By epoch, of three steps each; the best is first reached in epoch 2."""


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every evaluation measures."""
    monkeypatch.setattr(
        Trainer, "evaluate", lambda self: {"test_accuracy": ACCURACIES[self.epoch - 1], "test_loss": float(self.epoch)}
    )


def run(out: Path, *changes: str) -> api.RunConfig:
    return run_file([f"run.out={out}", "run.progress=none", "run.checkpoint.keep=1", "train.epochs=5", *changes])


def make(out: Path, *changes: str) -> Trainer:
    config = run(out, *changes)
    graph = build_graph(config)
    plan = build_plan(config, graph, 1)
    return Trainer(config, graph, plan, connect_to(plan.grid))


def steps(out: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in (out / "checkpoints").iterdir())


def test_the_best_value_and_when() -> None:
    best = Best("test_loss")
    for epoch, value in enumerate([3.0, float("nan"), 2.0, 2.0, 2.5, None], start=1):
        best.update({"epoch": epoch, "step": 10 * epoch} | ({} if value is None else {"test_loss": value}))
    assert best == Best("test_loss", 2.0, 3, 30)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ([], [6, 15]),
        (["train.early_stop={patience: 3}"], [6, 15]),
        (["run.checkpoint.every_epochs=5"], [6, 15]),  # saved for being the best
        (["run.checkpoint.keep=3"], [6, 9, 12, 15]),
        (["train.early_stop={patience: 9, metric: test_loss}"], [3, 15]),
        (["train.loss=mse", "data.test=null"], [15]),  # nothing is watched
    ],
)
def test_the_best_outlives_newer_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], kept: list[int]
) -> None:
    api.train(run(tmp_path, *changes), write=True).close()
    assert steps(tmp_path) == [*kept]
    report, said = json.loads((tmp_path / "report.json").read_text()), capsys.readouterr().out
    best = report.get("best")
    if "test_loss" in str(changes):
        assert (best["metric"], best["value"], best["epoch"]) == ("test_loss", 1.0, 1)
    elif len(kept) > 1:
        assert best == {
            "metric": "test_accuracy",
            "value": 0.9,
            "epoch": 2,
            "step": 6,
            "checkpoint": "checkpoints/step-000006",
        }
        assert f"best test_accuracy 0.9 after epoch 2: {tmp_path}/checkpoints/step-000006\n" in said
    else:
        assert best is None and "best test" not in said


def test_weights_of_the_best_the_last_and_a_step(tmp_path: Path) -> None:
    seen: dict[int, np.ndarray] = {}
    trainer = make(tmp_path, "run.checkpoint.keep=2")
    while not trainer.done:
        trainer.train_epoch()
        trainer.save(tmp_path)
        seen[trainer.step] = trainer.worker.state["fc.weight"].copy()
    for which, step in {"last": 15, "best": 6, 12: 12, "15": 15}.items():
        trainer.load(tmp_path, which)
        np.testing.assert_array_equal(trainer.worker.state["fc.weight"], seen[step])
    assert not np.array_equal(seen[6], seen[15])


def test_what_cannot_be_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint; train first"):
        find_checkpoint(tmp_path, "best")
    api.train(run(tmp_path, "data.test=null"), write=True).close()
    folder = tmp_path / "checkpoints"
    assert find_checkpoint(folder) == find_checkpoint(folder, 15) == folder / "step-000015"
    with pytest.raises(CheckpointError, match="watched no metric"):
        find_checkpoint(folder, "best")
    with pytest.raises(CheckpointError, match="no checkpoint of step 7, expected one of 15"):
        find_checkpoint(folder, 7)
    with pytest.raises(CheckpointError, match="got 'newest', expected best, last or a step"):
        find_checkpoint(folder, "newest")


def test_a_resumed_run_remembers_the_best(tmp_path: Path) -> None:
    def train(epochs: int, **options: Any) -> Best | None:
        with api.train(run(tmp_path, f"train.epochs={epochs}"), write=True, **options) as trained:
            return trained.trainer.best

    train(4)
    assert train(7, resume=True) == Best("test_accuracy", 0.9, 2, 6)
    assert steps(tmp_path) == [6, 21]
    assert find_checkpoint(tmp_path / "checkpoints", "best").name == "step-000006"


def test_a_best_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    api.train(run(tmp_path), write=True).close()
    (tmp_path / "checkpoints/step-000006").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="no checkpoint of step 6"):
        find_checkpoint(tmp_path / "checkpoints", "best")
    api.train(run(tmp_path, "train.epochs=7"), write=True, resume=True).close()
    assert steps(tmp_path) == [18, 21]  # epoch 6 has 0.9 too


def test_a_damaged_note_of_the_best_is_not_believed(tmp_path: Path) -> None:
    api.train(run(tmp_path, "run.checkpoint.keep=2"), write=True).close()
    meta = tmp_path / "checkpoints/step-000015/meta.json"
    meta.write_text(meta.read_text().replace('"step": 6', '"step": 12'))
    with pytest.raises(CheckpointError, match="damaged: meta.json changed since it was written"):
        find_checkpoint(tmp_path / "checkpoints", "best")


COSINE = "train.schedule={name: cosine}"


@pytest.mark.parametrize(
    ("before", "now", "jumps"),
    [
        ([COSINE], [COSINE, "train.epochs=8"], True),
        ([COSINE], ["train.epochs=5"], True),
        ([], ["train.optimizer.lr=0.01"], True),
        ([COSINE], [COSINE], False),
        ([], ["train.epochs=8"], False),
        ([COSINE], [COSINE, "train.epochs=3"], False),  # nothing is left to train
    ],
)
def test_a_rate_that_jumps_on_resume_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: list[str], now: list[str], jumps: bool
) -> None:
    first, second = (make(tmp_path, *changes) for changes in (before, now))
    for _ in range(3):
        first.train_epoch()
    first.save(tmp_path)
    assert second.resume(tmp_path)
    said = [r.getMessage() for r in caplog.records]
    rates = f"is {second.schedule(9):.4g} from step 10 on, but the run that wrote {tmp_path}/step-000009 would have gone on with"
    assert [rates in s and s.partition("gone on with ")[2].startswith(f"{first.schedule(9):.4g}:") for s in said] == [
        True
    ] * jumps


@pytest.mark.parametrize(("watch", "best"), [("test_loss", 4), ("loss", 3)])
def test_an_epoch_that_max_steps_ends(watch: str, best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test data say as much of the weights as ever; a part of the training data does not, and patience counts whole epochs."""
    monkeypatch.setattr(Trainer, "evaluate", lambda self: {"test_accuracy": 0.5, "test_loss": 1 / self.step})
    stop = f"train.early_stop={{patience: 9, metric: {watch}}}"
    trainer = make(tmp_path, f"train.evaluate.watch={watch}", stop, "train.max_steps=4", "train.optimizer.lr=0.3")
    records = list(trainer.train())
    assert [r["step"] for r in records] == [3, 4] and records[1][watch] < records[0][watch]
    assert trainer.best is not None and (trainer.best.step, trainer.best.value) == (best, records[best - 3][watch])
    assert trainer.early_stop is not None and trainer.early_stop.best == records[0][watch]
