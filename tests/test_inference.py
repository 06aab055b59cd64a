"""A run directory is enough to evaluate, predict and export what was trained, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file

from lbpar import api
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.writer import Split, write
from lbpar.errors import CheckpointError, ConfigError, DataError
from lbpar.inference import evaluate, export, predict
from lbpar.layout.grid import Grid
from lbpar.train.directory import run_config
from lbpar.transport.base import Transport
from lbpar.transport.virtual import VirtualWorld

LAYERS = [{"op": "conv", "filters": 4, "kernel": 3}, {"op": "relu"}, {"op": "global_avg_pool"}]
RUN: dict[str, Any] = {
    "model": {"input": [6, 6, 2], "layers": [*LAYERS, {"op": "linear", "features": 2, "name": "fc"}]},
    "train": {"batch": 8, "epochs": 12, "optimizer": {"name": "adam", "lr": 0.1}, "clip_norm": 1.0},
    "parallel": {"strategy": "data"},
    "engine": {"name": "numpy", "dtype": "float64", "threads": 1},
    "run": {"progress": "none"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray, dict[str, Any]]:
    """A run whose training data are gone: its directory, test samples and labels, and its last record."""
    folder = tmp_path_factory.mktemp("job")
    data = []
    for name in ("train", "test"):
        rng = np.random.default_rng(len(name))
        y = rng.integers(0, 2, 32)
        x = rng.integers(98, 103, (32, 6, 6, 2)).astype(np.uint8)
        x[..., 0] += 6 * y[:, None, None].astype(np.uint8)
        write(folder / f"{name}.h5", [Split("", x, y)], classes=2)
        data.append((x, y))
    with h5py.File(folder / "train.h5", "r+") as file:
        file["x"].attrs.update({"scale": 0.5, "mean": [52.0, 50.0], "std": [1.0, 0.8]})
    with h5py.File(folder / "test.h5", "r+") as file:
        file["x"].attrs["scale"] = 0.5
    run = api.load_run(RUN, [f"data={{train: {folder}/train.h5, test: {folder}/test.h5}}", f"run.out={folder}/run"])
    with api.train(run, write=True) as network:
        last = network.records[-1]
    (folder / "train.h5").unlink()
    assert last["test_accuracy"] == 1.0
    return folder / "run", *data[1], last


def test_evaluate(trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, _, _, last = trained
    assert evaluate(["--run", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"step": 48} | {k: v for k, v in last.items() if k.startswith("test_")}
    best = json.loads((run / "report.json").read_text())["best"]
    assert best["step"] < 48
    assert evaluate(["--run", str(run), "--checkpoint", "best", "--set", "train.evaluate.batch=5"]) == 0
    assert capsys.readouterr().out.startswith(f"step {best['step']}  test_loss")


@pytest.mark.parametrize(
    ("asked", "procs", "expected"),
    [("spatial", 1, "plan.yaml"), ("spatial", 4, "spatial"), ("auto", 4, "auto"), ("two.yaml", 4, "auto")],
)
def test_other_numbers_of_ranks_keep_a_named_strategy(
    trained: Any, tmp_path: Path, asked: str, procs: int, expected: str
) -> None:
    """No machine is measured, then, to evaluate on them."""
    for name in ("run.yaml", "plan.yaml"):
        text = (trained[0] / name).read_text()
        (tmp_path / name).write_text(text.replace("strategy: data", f"strategy: {asked}"))
    assert Path(run_config(tmp_path, procs).parallel.strategy).name == expected


@pytest.mark.parametrize("form", ["h5", "npy"])
def test_predict(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    run, x, y, _ = trained
    if form == "h5":
        with h5py.File(tmp_path / "in.h5", "w") as file:  # samples alone, stored in another way
            file["x"], file["x"].attrs["scale"] = x.astype(np.float32) / 2, 1.0
    else:
        np.save(tmp_path / "in.npy", x)
    args = ["--run", str(run), "--input", str(tmp_path / f"in.{form}"), "--out", str(tmp_path / f"out.{form}")]
    assert predict(args) == 0
    assert "32 x 2, float64, of step 48" in capsys.readouterr().out
    with api.restore(run) as network:
        expected = network.predict(x)
    if form == "h5":
        with h5py.File(tmp_path / "out.h5") as file:
            got = file["y"][...]
    else:
        got = np.load(tmp_path / "out.npy")
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert (got.argmax(1) == y).mean() == 1.0
    with pytest.raises(DataError, match="exists; --overwrite replaces"):
        predict(args)
    assert predict([*args, "--overwrite", "--checkpoint", "best"]) == 0


@pytest.mark.parametrize("form", ["h5", "npy"])
def test_predicted_classes_of_whole_samples(trained: Any, tmp_path: Path, form: str) -> None:
    run, x, y, _ = trained
    np.save(tmp_path / "in.npy", x)
    out = tmp_path / f"out.{form}"
    assert predict(["--run", str(run), "--input", str(tmp_path / "in.npy"), "--out", str(out), "--labels"]) == 0
    if form == "h5":
        with h5py.File(out) as file:
            np.testing.assert_array_equal(file["labels"][...], file["y"][...].argmax(-1))
            got = file["labels"][...]
    else:
        got = np.load(out)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, y)


@pytest.mark.parametrize("stored", [np.uint8, np.int16, np.float32])
def test_numbers_without_a_scale_are_not_taken_for_those_of_another_scale(
    trained: Any, tmp_path: Path, stored: type
) -> None:
    run, x, y, _ = trained
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["x"], file["y"] = x.astype(stored), y
    for call in (
        lambda: predict(["--run", str(run), "--input", str(tmp_path / "in.h5"), "--out", str(tmp_path / "out.npy")]),
        lambda: evaluate(["--run", str(run), "--set", f"data.test={tmp_path}/in.h5"]),
    ):
        with pytest.raises(DataError, match=r"in\.h5.*without a scale of its own.*training data are scaled by 0\.5"):
            call()
    with h5py.File(tmp_path / "in.h5", "r+") as file:
        file["x"].attrs["scale"] = 0.5
    assert evaluate(["--run", str(run), "--set", f"data.test={tmp_path}/in.h5"]) == 0
    assert not (tmp_path / "out.npy").exists()


def test_scores_that_are_not_finite_are_refused(trained: Any, tmp_path: Path) -> None:
    run, x, _, _ = trained
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["x"], file["x"].attrs["scale"] = x.astype(np.float64), 1.0
        file["x"][5] = 1e308
    with pytest.raises(DataError, match="sample 5 is not finite"), np.errstate(all="ignore"):
        predict(["--run", str(run), "--input", str(tmp_path / "in.h5"), "--out", str(tmp_path / "out.npy")])
    assert not (tmp_path / "out.npy").exists()
    data = Hdf5Dataset(tmp_path / "in.h5", "", y=None, dtype=np.float64)
    failing = pytest.raises(DataError, match="sample 5 is not finite")
    with api.restore(run) as network, failing, np.errstate(all="ignore"):
        network.predict(data)


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_export(trained: Any, tmp_path: Path, form: str) -> None:
    run, out = trained[0], tmp_path / "below" / f"weights.{form}"
    assert export(["--run", str(run), "--out", str(out)]) == 0
    with api.restore(run) as network:
        expected = network.weights()
    got = load_file(out) if form == "safetensors" else dict(np.load(out))
    assert got.keys() == expected.keys() == {"conv1.weight", "conv1.bias", "fc.weight", "fc.bias"}
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)
    assert list(out.parent.iterdir()) == [out]


def test_other_ranks(trained: Any) -> None:
    run, x, _, last = trained
    with api.restore(run) as network:
        expected = network.predict(x)

    def rank(transport: Transport) -> tuple[np.ndarray, dict[str, float]]:
        plan = ["parallel={strategy: data, layers: {conv1: {H: 3}}}"]
        network = api.restore(run, 48, plan, transport=transport)
        return network.predict(x), network.evaluate()

    for scores, measured in VirtualWorld(Grid.of(3)).run(rank):
        np.testing.assert_allclose(scores, expected, rtol=1e-10)
        assert measured == pytest.approx({k: v for k, v in last.items() if k.startswith("test_")})


@pytest.mark.parametrize(
    ("args", "error", "said"),
    [
        (["--checkpoint", "7"], CheckpointError, "no checkpoint of step 7"),
        (["--checkpoint", "newest"], CheckpointError, "--checkpoint: got 'newest', expected best, last or a step"),
        (["--set", "model.layers.0.filters=5"], CheckpointError, r"conv1.bias is \(4,\).*but \(5,\)"),
        (["--set", "data.test=null"], ConfigError, "evaluation needs test data"),
        (["--set", "engine.dtype=float32"], CheckpointError, "engine.dtype that wrote it"),
    ],
)
def test_what_does_not_fit(trained: Any, args: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        evaluate(["--run", str(trained[0]), *args])


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run.yaml: no such run directory's run file"):
        evaluate(["--run", str(tmp_path)])
    with pytest.raises(ConfigError, match="expected a name that ends in .safetensors, .npz"):
        export(["--run", str(tmp_path), "--out", "weights.pt"])


def test_arrays_that_cannot_be_predicted_are_named(trained: Any, tmp_path: Path) -> None:
    run, x, _, _ = trained
    path, args = tmp_path / "x.npy", ["--run", str(run), "--out", str(tmp_path / "o.npy"), "--input"]
    for save, said in (
        (lambda: np.save(path, x[0]), r"x\.npy has samples of shape \(6, 2\).*x\[None\]"),
        (lambda: np.save(path, np.array([{}, {}], object)), r"x\.npy is no whole array of numbers"),
        (lambda: path.write_text("1, 2, 3"), r"x\.npy is no whole array of numbers"),
        (lambda: path.write_bytes(b""), r"x\.npy is no whole array of numbers"),
    ):
        save()
        with pytest.raises(DataError, match=said):
            predict([*args, str(path)])
