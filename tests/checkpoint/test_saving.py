"""A run saved on n ranks and resumed on m equals the run that was never interrupted."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.checkpoint import saving
from lbpar.checkpoint.files import list_checkpoints, write_checkpoint
from lbpar.errors import CheckpointError
from tests.util.training import PLANS, Ran, assert_same, run_file, train

ALONE = (1, [])
MORE = [
    "train.optimizer={name: adam, lr: 0.01}",
    "train.schedule={name: cosine, warmup_epochs: 0.5}",
    "data.augment.flip=[W]",
]


def first_part(directory, epochs):
    def job(trainer):
        records = [trainer.train_epoch() for _ in range(epochs)]
        trainer.save(directory)
        return records

    return job


def rest(directory):
    def job(trainer):
        assert trainer.resume(directory)
        return list(trainer.train())

    return job


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        (ALONE, PLANS["mixed 4"], []),
        (PLANS["mixed 4"], ALONE, MORE),
        (PLANS["filter 3"], PLANS["mixed 6"], []),
        (PLANS["spatial 4"], PLANS["data 2"], MORE),
        (PLANS["data 3"], PLANS["stationary-w 4"], ["train.optimizer={name: lamb, lr: 0.01}"]),
    ],
    ids=["1 to 4", "4 to 1", "3 to 6", "4 to 2", "3 to 4"],
)
def test_resume_on_other_ranks_equals_the_uninterrupted_run(before, after, changes, tmp_path):
    whole = train(run_file(changes))
    one = train(run_file([*changes, *before[1]]), before[0], first_part(tmp_path, 2))
    two = train(run_file([*changes, *after[1]]), after[0], rest(tmp_path))
    assert_same(Ran(one.records + two.records, two.tensors), whole)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resume_inside_an_epoch(accumulate, tmp_path):
    changes = ["train.batch=4", f"train.accumulate={accumulate}", "train.epochs=2"]  # 6 batches an epoch
    whole = train(run_file(changes))
    part = train(run_file([*changes, "train.max_steps=2", *PLANS["mixed 4"][1]]), 4, first_part(tmp_path, 1))
    assert part.records[0]["step"] == 2
    after = train(run_file([*changes, *PLANS["data 3"][1]]), 3, rest(tmp_path))
    assert [r["step"] for r in after.records] == [r["step"] for r in whole.records]
    assert_same(Ran(whole.records[:1] + after.records[1:], after.tensors), whole)


def test_early_stop_goes_on_counting(tmp_path):
    changes = [
        "train.epochs=30",
        "train.optimizer.lr=1e-9",
        "train.early_stop={patience: 3, metric: test_loss, min_delta: 0.5}",
    ]
    train(run_file(changes), 1, first_part(tmp_path, 2))
    assert [r["epoch"] for r in train(run_file(changes), 1, rest(tmp_path)).records] == [3, 4]


def test_the_newest_few_are_kept_and_nothing_else(tmp_path):
    def job(trainer):
        for _ in range(3):
            trainer.train_epoch()
            trainer.save(tmp_path)
        return []

    train(run_file(["run.checkpoint.keep=2"]), 1, job)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000006", "step-000009"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000006", "step-000009"]


def test_no_checkpoint_is_told(tmp_path):
    assert not train(run_file(), 1, lambda t: [{"loss": t.resume(tmp_path)}]).records[0]["loss"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.seed=4", "train.seed: got 4, but the checkpoint was written with 3"),
        ("train.optimizer={name: adam, lr: 0.1}", "written with optimizer sgd, but this run has adam; resume with sgd"),
        ("train.optimizer.momentum=0", "momentum is .* in the checkpoint, but absent in this run"),
        ("model.layers.9.features=8", r"fc.bias is \(7,\) float64 in the checkpoint, but \(8,\) float64 in this run"),
        ("engine.dtype=float32", r"is \(.*\) float64 in the checkpoint, but \(.*\) float32 in this run"),
        ("model.layers.0.name=first", "conv1.weight is .* in the checkpoint, but absent in this run"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(change, message, tmp_path):
    config = run_file(["train.epochs=1"])
    train(config, 1, first_part(tmp_path, 1))
    text = None
    if change.startswith("model"):
        import yaml

        from tests.util.training import SMALL

        data = yaml.safe_load(SMALL)
        where, _, value = change.partition("=")
        _, _, index, field = where.split(".")
        data["model"]["layers"][int(index)][field] = int(value) if value.isdigit() else value
        text, change = yaml.safe_dump(data), "train.epochs=1"
    other = run_file([change], text) if text else run_file([change])
    with pytest.raises(CheckpointError, match=message):
        train(other, 2, rest(tmp_path))


def test_another_batch_is_taken_between_epochs_but_not_inside_one(tmp_path):
    train(run_file(), 1, first_part(tmp_path / "a", 1))
    assert len(train(run_file(["train.batch=11"]), 1, rest(tmp_path / "a")).records) == 2
    train(run_file(["train.max_steps=1"]), 1, first_part(tmp_path / "b", 1))
    with pytest.raises(CheckpointError, match="train.batch: got 11, but the checkpoint was written with 8"):
        train(run_file(["train.batch=11"]), 1, rest(tmp_path / "b"))


def test_one_damaged_rank_is_an_error_of_all(tmp_path):
    """A file that only one rank's node fails to read."""
    train(run_file(), 1, first_part(tmp_path, 1))

    def job(trainer):
        if trainer.transport.rank == 1:
            trainer.worker.layouts = dict(trainer.worker.layouts)
            trainer.worker.layouts.pop("fc.bias")
            trainer.worker.state.pop("fc.bias")
            trainer.optimizer.state.pop("fc.bias")
        with pytest.raises(CheckpointError, match="rank 1: .*fc.bias is .* absent in this run"):
            trainer.resume(tmp_path)
        return []

    def whole_is_not_asked(trainers):
        return {}

    from tests.util import training

    patch = pytest.MonkeyPatch()
    patch.setattr(training, "whole", whole_is_not_asked)
    try:
        train(run_file(["parallel.strategy=data"]), 2, job)
    finally:
        patch.undo()


@pytest.mark.parametrize("field", ["step", "epoch", "micro", "optimizer", "seed", "accumulate"])
def test_a_checkpoint_without_a_field_is_refused(field, tmp_path, monkeypatch):
    def without(path, tensors, blocks, meta):
        write_checkpoint(path, tensors, blocks, {k: v for k, v in meta.items() if k != field})

    monkeypatch.setattr(saving, "write_checkpoint", without)
    train(run_file(), 1, first_part(tmp_path, 1))
    with pytest.raises(CheckpointError, match=f"step-000003: its meta.json lacks {field}. There is no older whole one"):
        train(run_file(), 1, rest(tmp_path))


def test_a_checkpoint_that_cannot_be_written_is_an_error_of_all(tmp_path, monkeypatch):
    """The ranks whose blocks rank 0 can no longer take do not wait for it."""

    def full(path, tensors, blocks, meta):
        next(blocks)
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(saving, "write_checkpoint", full)

    def job(trainer):
        with pytest.raises(CheckpointError, match="rank 0: the disk is full"):
            trainer.save(tmp_path)
        return [trainer.train_epoch()]

    assert train(run_file(["parallel.strategy=filter"]), 3, job).records[0]["step"] == 3


@pytest.mark.parametrize("name", ["meta.json", "tensors.h5", "SHA256SUMS"])
def test_a_damaged_checkpoint_is_refused_on_all_ranks_and_changes_nothing(name, tmp_path):
    def twice(trainer):
        for _ in range(2):
            trainer.train_epoch()
            trainer.save(tmp_path)
        return []

    train(run_file(), 1, twice)
    file = tmp_path / "step-000006" / name
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    file.write_bytes(raw)

    def job(trainer):
        with pytest.raises(CheckpointError, match="rank 0: .*step-000006: damaged: .*whole one is .*step-000003"):
            trainer.resume(tmp_path)
        return [trainer.train_epoch()]

    first = train(run_file(["train.epochs=1"]), 1)
    assert_same(train(run_file(["parallel.strategy=filter"]), 2, job), first)


def test_nothing_is_rounded(tmp_path):
    """Saving and reading in float32 returns the same bits, on other ranks too."""
    changes = ["engine.dtype=float32"]
    saved = train(run_file(changes), 1, first_part(tmp_path, 1))

    def job(trainer):
        trainer.resume(tmp_path)
        return []

    read = train(run_file([*changes, *PLANS["mixed 4"][1]]), 4, job)
    for name, array in saved.tensors.items():
        np.testing.assert_array_equal(read.tensors[name], array)
