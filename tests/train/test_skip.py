"""``data.nan: skip``: a run is that of the samples that are left, in training and evaluation, on any grid, from any kind of source."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lbpar import api
from lbpar.data.named import NamedDataset
from lbpar.data.subset import Subset
from lbpar.errors import DataError
from lbpar.train.setup import build_graph, build_plan
from lbpar.train.trainer import Trainer
from lbpar.transport.virtual import VirtualWorld
from tests.util.training import Ran, assert_same, measured, run_file, whole

RNG = np.random.default_rng(3)
X = RNG.standard_normal((9, 6, 5, 4, 2))
Y = (X[..., 0] > 0.3).astype(np.uint8)
BAD = (0, 5, 8)
SPOILT = X.copy()
SPOILT[0, 5, 4, 3, 1], SPOILT[5], SPOILT[8, 0, 0, 0, 0] = np.nan, np.inf, -np.inf
LEFT = [i for i in range(9) if i not in BAD]
RUN = """
model: {input: [6, 5, 4, 2], layers: [{op: conv, filters: 3, kernel: 3, pad: 1, name: low}, {op: relu}, {op: conv, filters: 2, kernel: 1, name: last}]}
data: {nan: skip}
train: {batch: 4, epochs: 2, seed: 5, loss: dice, optimizer: {name: sgd, lr: 0.1}}
engine: {name: numpy, dtype: float64}
run: {progress: none}
"""
GRIDS = [(1, "spatial"), (2, "spatial"), (3, "data"), (4, "spatial")]


def write(path: Path, x: np.ndarray, y: np.ndarray, tx: np.ndarray, ty: np.ndarray) -> str:
    with h5py.File(path, "w") as f:
        f["train/x"], f["train/y"], f["test/x"], f["test/y"] = x, y, tx, ty
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """With samples that are spoilt, and without these."""
    spoilt = write(tmp_path / "spoilt.h5", SPOILT, Y, SPOILT[::2], Y[::2])
    rest = [i for i in range(0, 9, 2) if i not in BAD]
    return spoilt, write(tmp_path / "left.h5", X[LEFT], Y[LEFT], X[rest], Y[rest])


def train(changes: list[str], procs: int = 1, text: str = RUN) -> tuple[Ran, list[Trainer]]:
    """A run whose ranks tell each other what each has found."""
    config = run_file(changes, text)
    graph = build_graph(config)
    plan = build_plan(config, graph, procs)

    def one(transport: Any) -> Any:
        trainer = Trainer.alike(config, graph, plan, transport)
        return trainer, [measured(r) for r in trainer.train()]

    world = VirtualWorld(plan.grid)
    ran = world.run(one)
    world.check_idle()
    assert all(records == ran[0][1] for _, records in ran)
    trainers = [t for t, _ in ran]
    return Ran(ran[0][1], whole(trainers)), trainers


@pytest.mark.parametrize(("procs", "plan"), GRIDS)
@pytest.mark.parametrize("more", ["data.normalise=null", "data.normalise=zscore"])
def test_a_run_is_that_of_the_samples_that_are_left(
    procs: int, plan: str, more: str, files: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    spoilt, left = files
    with caplog.at_level(logging.WARNING, "lbpar"):
        got, trainers = train(
            [f"data.train={spoilt}", f"data.test={spoilt}", more, f"parallel={{strategy: {plan}}}"], procs
        )
    told = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(told) == 2 and "3 of 9 samples have values that are not finite and are left out: 0, 5, 8." in told[1]
    want, _ = train([f"data.train={left}", f"data.test={left}", more, "data.nan=refuse"])
    assert_same(got, want)
    for trainer in trainers:
        assert isinstance(trainer.volumes, Subset) and trainer.volumes.numbers.tolist() == LEFT
        assert trainer.volumes.bytes_read[1] > 0 or procs > 1


@pytest.mark.parametrize(("procs", "plan"), GRIDS[:2])
def test_patches_and_files_are_of_the_samples_that_are_left(procs: int, plan: str, tmp_path: Path) -> None:
    for name, some in (("spoilt", range(9)), ("left", LEFT)):
        (tmp_path / name).mkdir()
        for i in some:
            with h5py.File(tmp_path / name / f"{i}.h5", "w") as f:
                f["x"], f["y"] = SPOILT[i : i + 1], Y[i : i + 1]
    for patches in ("null", "{per_sample: 2, foreground: 0.5}"):
        shape = "6, 5, 4, 2" if patches == "null" else "3, 4, 4, 2"
        changes = [f"data.patches={patches}", f"model.input=[{shape}]"]
        got, _ = train(
            [f"data.train={{files: '{tmp_path}/spoilt/*.h5'}}", *changes, f"parallel={{strategy: {plan}}}"], procs
        )
        assert_same(got, train([f"data.train={{files: '{tmp_path}/left/*.h5'}}", *changes])[0])


NAMED = """
model:
  input: {image: [6, 5, 4, 2], facts: [3]}
  layers:
    - {op: global_avg_pool, from: image, name: pool}
    - {op: concat, from: [pool, facts], name: both}
    - {op: linear, features: 2, from: both, name: size}
    - {op: conv, filters: 2, kernel: 1, from: image, name: seg}
  outputs: [seg, size]
data: {nan: skip}
train: {batch: 4, epochs: 2, seed: 5, losses: {seg: {loss: dice, target: mask}, size: {loss: mse}}}
engine: {name: numpy, dtype: float64}
"""


@pytest.mark.parametrize(("procs", "plan"), GRIDS[:3:2])
def test_a_sample_is_left_out_with_all_of_its_inputs_and_targets(procs: int, plan: str, tmp_path: Path) -> None:
    facts, size = RNG.standard_normal((9, 3)), RNG.standard_normal((9, 2)).astype(np.float32)
    image = X.copy()
    image[0, 2, 2, 2, 0], facts[5, 1], size[8, 0] = np.nan, np.inf, np.nan  # each in another
    for name, some in (("spoilt", [*range(9)]), ("left", LEFT)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as f:
            f["image"], f["facts"], f["mask"], f["size"] = image[some], facts[some], Y[some], size[some]
    got, trainers = train([f"data.train={tmp_path}/spoilt.h5", f"parallel={{strategy: {plan}}}"], procs, NAMED)
    assert isinstance(trainers[0].volumes, NamedDataset) and len(trainers[0].dataset) == 6
    assert_same(got, train([f"data.train={tmp_path}/left.h5"], 1, NAMED)[0])
    with pytest.raises(DataError, match=r"target nan in sample 8 of '/size', expected a finite number"):
        train([f"data.train={tmp_path}/spoilt.h5", "data.nan=zero"], 1, NAMED)


def test_runs_go_on_evaluate_and_say_what_was_left_out_and_predictions_refuse(
    files: tuple[str, str], tmp_path: Path
) -> None:
    spoilt, left = files
    changes = [f"data.train={spoilt}", f"data.test={spoilt}", "run.checkpoint={every_epochs: 1}"]
    with api.train(run_file([*changes, f"run.out={tmp_path}/a"], RUN), write=True) as trained:
        want = trained.weights()
    report = json.loads((tmp_path / "a/report.json").read_text())
    assert report["samples_left_out"] == {
        "data.train": {"number": 3, "first": [0, 5, 8]},
        "data.test": {"number": 2, "first": [0, 4]},
    }
    half = [*changes, f"run.out={tmp_path}/b"]
    api.train(run_file([*half, "train.epochs=1"], RUN), write=True).close()
    with api.train(run_file(half, RUN), write=True, resume=True) as trained:
        for name, tensor in trained.weights().items():
            np.testing.assert_allclose(tensor, want[name], rtol=1e-12)
        again = trained.evaluate()
        with pytest.raises(DataError, match="sample 0 has values that are not finite"):
            trained.predict(SPOILT)
    with api.restore(tmp_path / "b") as restored:
        assert restored.evaluate() == pytest.approx(again)
    with api.restore(tmp_path / "b", overrides=[f"data.test={left}"]) as restored:
        assert restored.evaluate() == pytest.approx(again)


@pytest.mark.parametrize("procs", [1, 3])
def test_a_file_without_a_sample_that_can_be_used_is_refused(procs: int, tmp_path: Path) -> None:
    file = write(tmp_path / "all.h5", np.full_like(X, np.nan), Y, X, Y)
    with pytest.raises(DataError, match=r"all of its 9 samples have values that are not finite.*data\.nan: zero"):
        train([f"data.train={file}", "parallel={strategy: data}"], procs)
