"""The train command on one rank: what it leaves behind, and what it says of bad input."""

from __future__ import annotations

import csv
import json
import os
import platform
import signal
from datetime import datetime

import numpy as np
import pytest

from lbpar import __version__
from lbpar.errors import LbparError
from lbpar.train.command import main
from lbpar.train.saver import Saver
from lbpar.train.trainer import Trainer
from lbpar.transport.stop import NUMBERS, STOPPED
from tests.util.training import SMALL, measured, run_file, train

h5py = pytest.importorskip("h5py")


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Writes the small run file with some text replaced, and trains."""
    monkeypatch.setenv("LBPAR_ALONE", "1")
    monkeypatch.chdir(tmp_path)

    def run(*args, replace=("", ""), text=SMALL):
        (tmp_path / "run.yaml").write_text(text.replace(*replace) if replace[0] else text)
        sets = [part for a in args if a.startswith("--") is False for part in ("--set", a)]
        return main(["--config", "run.yaml", "--set", "run.out=out", *sets, *[a for a in args if a.startswith("--")]])

    return run


def records(path):
    return [json.loads(line) for line in (path / "out" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_directory(job, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    assert job("run.metrics={csv: true, tensorboard: true}", "run.checkpoint.keep=1") == 0
    out = tmp_path / "out"
    names = {p.name for p in out.iterdir() if not p.name.startswith("events.out.tfevents.")}
    assert names == {"plan.yaml", "run.yaml", "metrics.jsonl", "metrics.csv", "report.json", "step.json", "checkpoints"}
    assert len(list(out.glob("events.out.tfevents.*"))) == 1
    want = train(run_file()).records
    best = max(want, key=lambda r: r["test_accuracy"])["step"]
    assert {p.name for p in (out / "checkpoints").iterdir()} == {f"step-{best:06d}", "step-000009"}
    assert [measured(r) for r in records(tmp_path)] == want
    with open(out / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(r["test_loss"]) for r in rows] == [r["test_loss"] for r in want]
    report = json.loads((out / "report.json").read_text())
    assert report["test_accuracy"] == want[-1]["test_accuracy"]
    assert report["procs"] == 1
    assert report["hosts"] == {platform.node(): [0]}
    assert report["versions"]["lbpar"] == __version__
    began, ended = (datetime.fromisoformat(report[k]) for k in ("started", "ended"))
    times = [datetime.fromisoformat(r["time"]) for r in records(tmp_path)]
    assert [began, *times, ended] == sorted([began, *times, ended])
    (rank,) = report["ranks"]
    assert rank["seconds"]["total"] == pytest.approx(sum(r["seconds"] for r in records(tmp_path)))
    assert rank["seconds"]["compute"] == pytest.approx(sum(r["steps"]["compute"]["seconds"] for r in records(tmp_path)))
    assert report["state_bytes"] > 8 * 2 * report["parameters"]  # weights and momentum, and running statistics
    assert {"conv1", "fc", "loss"} <= {row["layer"] for row in report["layers"]}
    text = capsys.readouterr()
    assert "epoch 3/3: loss" in text.out
    assert "per step and rank 0" in text.out
    assert text.err == ""


def test_resume_continues_the_files(job, tmp_path):
    assert job("train.epochs=2") == 0
    assert job("--resume") == 0
    assert [measured(r) for r in records(tmp_path)] == train(run_file()).records


def test_an_epoch_that_max_steps_ended_has_one_record_when_the_run_goes_on(job, tmp_path):
    options = "train.schedule={name: constant}", "run.metrics.csv=true"
    assert job("train.max_steps=4", *options) == 0
    assert [(r["epoch"], r["step"]) for r in records(tmp_path)] == [(1, 3), (2, 4)]
    assert job("--resume", *options) == 0
    assert [(r["epoch"], r["step"]) for r in records(tmp_path)] == [(1, 3), (2, 6), (3, 9)]
    with open(tmp_path / "out" / "metrics.csv", newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["3", "6", "9"]
    want = train(run_file(["train.schedule={name: constant}"])).records
    assert [r["loss"] for r in records(tmp_path)] == [r["loss"] for r in want]


def test_resume_auto_starts_anew_and_goes_on(job, tmp_path):
    assert job("--resume=auto", "train.epochs=2") == 0
    assert job("--resume=auto") == 0
    assert [measured(r) for r in records(tmp_path)] == train(run_file()).records


def test_resume_of_a_finished_run_changes_nothing(job, tmp_path, capsys):
    assert job() == 0
    before = {p: p.read_bytes() for p in (tmp_path / "out").iterdir() if p.is_file()}
    assert job("--resume") == 0
    assert "nothing left to train after epoch 3, step 9" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in (tmp_path / "out").iterdir() if p.is_file()} == before


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_the_run_after_its_step_and_resume_goes_on(job, tmp_path, monkeypatch, capsys, number):
    real, before = Saver.after_batch, {n: signal.getsignal(n) for n in NUMBERS}

    def after_batch(saver):
        os.kill(os.getpid(), number)
        while saver._stop() is None:
            pass
        real(saver)

    with monkeypatch.context() as patched, pytest.raises(SystemExit) as end:
        patched.setattr(Saver, "after_batch", after_batch)
        job()
    for n, handler in before.items():  # it leaves them ignored
        signal.signal(n, handler)
    assert end.value.code == STOPPED == 75
    assert f"{number.name}: saved after step 1, to go on with --resume; exit status 75" in capsys.readouterr().out
    assert job("--resume") == 0
    assert [measured(r) for r in records(tmp_path)] == train(run_file()).records


def test_a_run_without_checkpoints_goes_on_after_the_notice_of_a_limit(job, tmp_path, monkeypatch):
    monkeypatch.setattr(Saver, "after_epoch", lambda saver: os.kill(os.getpid(), signal.SIGUSR1))
    assert job("run.checkpoint=null", "train.epochs=1") == 0
    assert len(records(tmp_path)) == 1


def test_no_epochs_and_no_checkpoints(job, tmp_path):
    assert job("train.epochs=0", "run.checkpoint=null", "run.progress=none") == 0
    assert records(tmp_path) == []


@pytest.mark.parametrize(
    ("args", "replace", "message"),
    [
        (["train.epoch=3"], ("", ""), "train.epoch: unknown field (got 3); did you mean 'epochs'?"),
        (["train.batch=many"], ("", ""), "train.batch: got 'many', expected a whole number"),
        ([], ("op: relu", "op: rellu"), "rellu"),
        (["train.optimizer.name=sdg"], ("", ""), "train.optimizer"),
        (
            ["parallel.layers={conv1: {N: 2}}"],
            ("", ""),
            "parallel.layers.conv1: N 2 is 2 ways, which do not divide 1 process",
        ),
        (["parallel.layers={fc: {H: 1}}"], ("", ""), "fc: a linear has no loop 'H'; its loops are N, F, C"),
        (["parallel.procs=4"], ("", ""), "parallel.procs: the run file asks for 4, but this job has 1; start 4"),
        (
            ["parallel.layers={conv: {N: 1}}"],
            ("", ""),
            "parallel.layers: network has no layer 'conv'; did you mean 'conv",
        ),
        (["parallel.strategy=missing.yaml"], ("", ""), "missing.yaml: no such plan file"),
        (["data.train=missing.h5"], ("", ""), "missing.h5"),
        (["train.loss=bce", "train.label_smoothing=0.1"], ("", ""), "train.label_smoothing: got 0.1 with loss bce"),
        (["engine.dtype=float16"], ("", ""), "engine.dtype: float16"),
        (["--resume"], ("", ""), "--resume: out/checkpoints holds no checkpoint"),
        ([], ("kernel: 3, pad: 1, bias: false, name: conv1", "kernel: 30, name: conv1"), "model.layers[0]: conv1"),
    ],
)
def test_bad_input_leaves_nothing_behind(job, tmp_path, args, replace, message):
    with pytest.raises(LbparError) as e:
        job(*args, replace=replace)
    assert message in str(e.value)
    assert not (tmp_path / "out").exists()


def write(path, x=None, y=None, name="x"):
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file[name] = rng.standard_normal((22, 6, 5, 2)).astype("f4") if x is None else x
        file["y"] = rng.integers(0, 7, 22) if y is None else y


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": np.zeros((22, 2, 6, 5), "f4")}, "expected (6, 5, 2), the network's input. lbpar stores channels last"),
        ({"x": np.array([b"text"] * 22)}, "data.h5"),
        ({"y": np.full(22, 7)}, "7"),
        ({"y": np.zeros(22, "f4")}, "expected whole-number labels of 7 classes"),
        ({"y": np.zeros(21, "i8")}, "21"),
        ({"name": "images"}, "x"),
    ],
    ids=["shape", "dtype", "label", "label dtype", "lengths", "name"],
)
def test_bad_data_leaves_nothing_behind(job, tmp_path, content, message):
    write(tmp_path / "data.h5", **content)
    with pytest.raises(LbparError) as e:
        job("data.train=data.h5")
    assert "data.h5" in str(e.value)
    assert message in str(e.value)
    assert not (tmp_path / "out").exists()


def test_a_truncated_file_leaves_nothing_behind(job, tmp_path):
    write(tmp_path / "data.h5")
    os.truncate(tmp_path / "data.h5", 3000)
    with pytest.raises(LbparError, match="data.h5"):
        job("data.train=data.h5")
    assert not (tmp_path / "out").exists()


def test_an_existing_run_is_refused_and_untouched(job, tmp_path):
    assert job("train.epochs=1") == 0
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    with pytest.raises(LbparError, match="out holds an earlier run; add --resume to go on with it, or choose another"):
        job("train.epochs=1")
    assert {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == before


def test_a_run_that_failed_before_its_first_record_may_be_tried_again(job, tmp_path):
    with pytest.raises(LbparError, match="step 2: the loss is nan"):
        job("train.optimizer.lr=1e200")
    assert job("train.epochs=1") == 0
    assert len(records(tmp_path)) == 1


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nowhere"])
def test_a_directory_that_cannot_be_written(job, tmp_path, out):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(LbparError, match=f"run.out: {out} cannot be written.*choose another directory"):
        job(f"run.out={out}")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("checkpoints", False),
        ("metrics.jsonl", True),
        ("metrics.csv", True),
        ("plan.yaml", True),
        ("run.yaml", True),
        ("report.json", True),
        ("trace.json", True),
    ],
)
def test_whatever_a_run_writes_is_tried_before_it_starts(job, tmp_path, monkeypatch, name, folder):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).mkdir() if folder else (tmp_path / "out" / name).write_text("mine")
    monkeypatch.setattr(Trainer, "train_epoch", None)
    with pytest.raises(
        LbparError, match=f"run.out: out/{name} cannot be written: it is not a .*choose another directory"
    ):
        job("run.trace=true", "run.metrics.csv=true")
    assert [p.name for p in (tmp_path / "out").iterdir() if not p.name.startswith("checkpoints")] == [name] * folder


def test_what_a_run_does_not_write_may_lie_there(job, tmp_path):
    (tmp_path / "out" / "metrics.csv").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints").write_text("mine")
    assert job("train.epochs=1", "run.checkpoint=null") == 0
    assert (tmp_path / "out" / "checkpoints").read_text() == "mine"


def test_an_early_stop_is_said(job, capsys):
    stop = "train.early_stop={patience: 1, metric: loss, min_delta: 100}"
    assert job("train.epochs=5", stop) == 0
    text = capsys.readouterr().out
    assert "early stop after epoch 2: loss no better than" in text and "in 1 evaluation\n" in text
    assert job("train.epochs=5", stop, "--resume") == 0
    assert "nothing left to train after epoch 2, step 6 (early stop: loss no better than" in capsys.readouterr().out
