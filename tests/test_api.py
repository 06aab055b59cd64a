"""The calls of lbpar.api do what the command lines do; tests/mpi/test_api.py runs them on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lbpar import api
from lbpar.data.synthetic import SyntheticDataset
from lbpar.data.writer import Split, write
from lbpar.errors import CheckpointError, ConfigError, DataError, PlanError
from lbpar.train.command import main as train_command
from lbpar.verify.command import main as verify_command

RUN: dict[str, Any] = {
    "model": {
        "input": [6, 6, 2],
        "layers": [
            {"op": "conv", "filters": 4, "kernel": 3, "name": "c"},
            {"op": "norm"},
            {"op": "relu"},
            {"op": "global_avg_pool"},
            {"op": "linear", "features": 3, "name": "fc"},
        ],
    },
    "data": {"train": "synthetic", "test": "synthetic", "samples": 24},
    "train": {"batch": 8, "epochs": 2, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    "engine": {"name": "numpy", "dtype": "float64"},
}


def config(*overrides: str) -> api.RunConfig:
    return api.load_run(RUN, overrides)


def test_a_dict_is_a_run_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(RUN))
    assert api.load_run(path, ["train.epochs=5"]) == config("train.epochs=5")
    with pytest.raises(ConfigError, match="did you mean 'epochs'"):
        config("train.epoch=5")


def test_plan_and_explain() -> None:
    run = config("parallel.layers={c: {H: 2, F: 2}}")
    graph = api.build_graph(run)
    plan = api.make_plan(run, graph, procs=4)
    assert plan.ways("c") == {"H": 2, "F": 2}
    rows = {r["layer"]: r for r in api.explain(graph, plan, batch=8)}
    assert sorted(rows["c"]["grid"].split(" × ")) == ["filters 2", "height 2"]
    assert "allreduce(2)" in rows["c"]["collectives"] and rows["c"]["bytes/step"] > 0
    with pytest.raises(PlanError, match="H 3 is 3 ways"):
        api.make_plan(config("parallel.layers={c: {H: 3}}"), procs=4)


def test_plan_file_goes_round(tmp_path: Path) -> None:
    run = config("parallel.layers={c: {H: 2, F: 2}}")
    plan = api.make_plan(run, procs=4)
    api.save_plan(plan, tmp_path / "plan.yaml", batch=8)
    again = api.make_plan(run, procs=4, plan_file=tmp_path / "plan.yaml")
    assert again.grid == plan.grid and all(again.ways(n) == plan.ways(n) for n in plan.ops)


def test_verify_says_what_the_command_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(RUN))
    result = api.verify(config(), procs=3, random_plans=2, seed=4)
    assert result.simulated and result.procs == 3 and result.equal() and len(result.plans) == 3
    out = tmp_path / "out.json"
    args = ["--config", str(tmp_path / "run.yaml"), "--procs", "3", "--random-plans", "2", "--seed", "4"]
    assert verify_command([*args, "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    assert told["worst"] == result.worst and told["tensors"] == result.tensors
    assert [p["bytes"] for p in told["plans"]] == [p.sent for p in result.plans.values()]
    assert verify_command([*args, "--tolerance", "1e-30"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lars", "lamb"])
def test_every_optimizer_passes_on_simulated_ranks(optimizer: str) -> None:
    run = config(
        f"train.optimizer={{name: {optimizer}, lr: 0.1}}", "parallel.layers={c: {F: 2, H: 2}, fc: {F: 2, C: 2}}"
    )
    assert api.verify(run, procs=4, random_plans=2).equal()


def test_verify_refuses_what_contradicts_itself() -> None:
    run = config()
    with pytest.raises(ConfigError, match="leave one of them out"):
        api.verify(run, plan=api.make_plan(run, procs=2), procs=3)


def test_train_is_the_command_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps(RUN))
    seen: list[int] = []
    with api.train(config(), on_epoch=lambda record: seen.append(record["epoch"])) as trained:
        quiet = trained.records
        again = trained.evaluate()
    assert seen == [1, 2] and not (tmp_path / "runs").exists()
    assert again["test_loss"] == quiet[-1]["test_loss"]
    assert train_command(["--config", "run.yaml"]) == 0
    lines = [json.loads(s) for s in (tmp_path / "runs/default/metrics.jsonl").read_text().splitlines()]
    assert [r["loss"] for r in lines] == [r["loss"] for r in quiet]


def test_written_run_is_evaluated_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = config(f"run.out={tmp_path / 'run'}", "run.progress=none")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        api.evaluate(run)
    with api.train(run, write=True) as trained:
        last = trained.records[-1]
    assert api.evaluate(run) == {k: v for k, v in last.items() if k.startswith("test_")}
    for folder in ("run", "run/checkpoints"):
        assert api.evaluate(run, tmp_path / folder) == api.evaluate(run)
    with pytest.raises(CheckpointError, match="holds an earlier run"):
        api.train(run, write=True)
    longer = run.model_copy(update={"train": run.train.model_copy(update={"epochs": 3})})
    with api.train(longer, write=True, resume=True) as trained:
        assert [r["epoch"] for r in trained.records] == [3]
    assert "resumed after epoch 2" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="needs write=True"):
        api.train(run, resume=True)


def test_predictions_score_what_evaluation_says(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((21, 6, 6, 2)), rng.integers(0, 3, 21)
    write(tmp_path / "own.h5", [Split("train", x, y), Split("test", x, y)], classes=3)
    run = config(f"data.train={tmp_path / 'own.h5'}", f"data.test={tmp_path / 'own.h5'}")
    with api.train(run) as trained:
        scores = trained.predict(x)
        assert scores.shape == (21, 3) and trained.predict(x[:0]).shape == (0, 3)
        assert (scores.argmax(1) == y).mean() == pytest.approx(trained.evaluate()["test_accuracy"])
        assert trained.weights()["c.weight"].shape == (4, 3, 3, 2)
        with pytest.raises(DataError, match="channels last"):
            trained.predict(x.transpose(0, 3, 1, 2))


def _coloured(path: Path, name: str, attributes: dict[str, Any], seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Bytes whose class is the brighter channel, by a little: invisible without mean and std."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, 32)
    x = rng.integers(98, 103, (32, 6, 6, 2)).astype(np.uint8)
    x[..., 0] += 6 * y[:, None, None].astype(np.uint8)
    write(path / name, [Split("", x, y)], classes=2, overwrite=True)
    with h5py.File(path / name, "r+") as file:
        file["x"].attrs.update(attributes)
    return x, y


OWN = {"scale": 0.5, "mean": [52.0, 50.0], "std": [1.0, 0.8]}


def _coloured_run(tmp_path: Path, *overrides: str) -> api.RunConfig:
    data = {"train": str(tmp_path / "own.h5"), "test": str(tmp_path / "test.h5")}
    layers = [{"op": "conv", "filters": 4, "kernel": 3}, {"op": "relu"}, {"op": "global_avg_pool"}]
    model = {"input": [6, 6, 2], "layers": [*layers, {"op": "linear", "features": 2}]}
    return api.load_run({**RUN, "model": model, "data": data}, ["train.epochs=12", *overrides])


def test_predict_evaluate_and_train_read_samples_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, y = _coloured(tmp_path, "own.h5", OWN)
    _coloured(tmp_path, "test.h5", OWN, seed=6)
    with api.train(_coloured_run(tmp_path)) as trained:
        assert trained.records[-1]["accuracy"] == trained.records[-1]["test_accuracy"] == 1.0
        scores = trained.predict(x)
        assert (scores.argmax(1) == y).mean() == 1.0
        np.testing.assert_allclose(
            trained.predict((x * 0.5 - [52, 50]) / [1, 0.8], normalised=True), scores, rtol=1e-12
        )
        np.testing.assert_array_equal(trained.predict(x.astype(np.int64)), scores)
        with pytest.raises(DataError, match=r"predict: got float64, expected whole numbers"):
            trained.predict(x / 255)
    assert not caplog.records


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_real_numbers_become_the_engines(dtype: str) -> None:
    with api.train(config(f"engine.dtype={dtype}")) as trained:
        scores = [
            trained.evaluate(SyntheticDataset(16, (6, 6, 2), (), 3, dtype=kind)) for kind in ("float32", "float64")
        ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-6) and (dtype == "float64" or scores[0] == scores[1])


@pytest.mark.parametrize("theirs", [{}, {"scale": 0.5, "mean": [50.0, 50.0], "std": [9.0, 9.0]}])
def test_test_data_are_normalised_like_training_data(
    tmp_path: Path, theirs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    _coloured(tmp_path, "own.h5", OWN)
    x, y = _coloured(tmp_path, "test.h5", {"scale": 0.5} | theirs, seed=6)
    with api.train(_coloured_run(tmp_path)) as trained:
        assert trained.records[-1]["test_accuracy"] == (trained.predict(x).argmax(1) == y).mean() == 1.0
    assert ["mean and std differ" in r.message for r in caplog.records] == [True] * bool(theirs)


def test_data_that_were_normalised_anew_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("own.h5", "test.h5"):
        _coloured(tmp_path, name, OWN, seed=len(name))
    run = _coloured_run(tmp_path, f"run.out={tmp_path / 'run'}", "run.progress=none", "train.epochs=3")
    with api.train(run, write=True) as trained:
        expected = trained.evaluate()
    with h5py.File(tmp_path / "own.h5", "r+") as file:
        file["x"].attrs["std"] = [2.0, 3.0]
    assert api.evaluate(run) == expected  # as the network was trained
    assert not caplog.records
    longer = run.model_copy(update={"train": run.train.model_copy(update={"epochs": 4})})
    api.train(longer, write=True, resume=True).close()
    assert "data.train: scale, mean and std are not those of the run" in caplog.records[-1].getMessage()


def _open_below(folder: Path) -> list[str]:
    links = [os.path.join("/proc/self/fd", n) for n in os.listdir("/proc/self/fd")]
    return [os.readlink(f) for f in links if os.path.lexists(f) and os.readlink(f).startswith(f"{folder}/")]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux' list of open files")
@pytest.mark.parametrize("write_run", [False, True])
def test_no_file_stays_open(tmp_path: Path, write_run: bool) -> None:
    for name in ("own.h5", "test.h5"):
        _coloured(tmp_path, name, {})
    shown = ["run.progress=none", "run.metrics={csv: true, tensorboard: true}", "run.trace=true", "data.cache=0"]
    run = _coloured_run(tmp_path, *shown, "train.epochs=2", f"run.out={tmp_path / 'run'}")
    with api.train(run, write=write_run) as trained:
        trained.evaluate()
        assert _open_below(tmp_path)
    assert not _open_below(tmp_path)

    def fail(record: dict[str, Any]) -> None:
        assert _open_below(tmp_path)
        raise KeyError("of the caller")

    again = run.model_copy(update={"run": run.run.model_copy(update={"out": str(tmp_path / "again")})})
    with pytest.raises(KeyError, match="of the caller"):
        api.train(again, write=write_run, on_epoch=fail)
    assert not _open_below(tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        api.evaluate(again, tmp_path / "none")
    with pytest.raises(DataError):
        api.train(_coloured_run(tmp_path, "data.test=nowhere.h5"))
    assert not _open_below(tmp_path)
    _coloured(tmp_path, "own.h5", {}, seed=7)  # the caller may write it again


def test_plan_of_another_job_is_refused() -> None:
    run = config()
    with pytest.raises(ConfigError, match="2 processes, but 1 were started"):
        api.train(run, plan=api.make_plan(run, procs=2))


def test_importing_lbpar_stays_light() -> None:
    code = "import sys, lbpar; sys.exit('numpy' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
