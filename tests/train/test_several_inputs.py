"""Several inputs and targets by name, from the run file to predictions: the same on any grid, and each part what its loss says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lbpar import api, inference
from lbpar.data.augment.apply import augmented
from lbpar.data.named import NamedDataset
from lbpar.errors import ConfigError, DataError, GraphError
from lbpar.layout.grid import Grid
from lbpar.train.trainer import Trainer
from lbpar.transport.base import Transport
from lbpar.transport.virtual import VirtualWorld
from tests.util.training import run_file, train

RUN = """
model:
  input: {image: [6, 5, 4, 1], facts: [3]}
  layers:
    - {op: conv, filters: 4, kernel: 3, pad: 1, name: body}
    - {op: relu, name: act}
    - {op: conv, filters: 3, kernel: 1, name: seg}
    - {op: global_avg_pool, from: act, name: pool}
    - {op: linear, features: 4, from: facts, name: known}
    - {op: concat, from: [pool, known], name: both}
    - {op: linear, features: 2, from: both, name: size}
  outputs: [seg, size]
data: {train: synthetic, test: synthetic, samples: 7}
train:
  batch: 3
  epochs: 2
  seed: 5
  losses: {seg: {loss: {name: dice_cross_entropy, ignore_index: 255}, target: mask}, size: {loss: mse, weight: 0.5}}
  evaluate: {metrics: [dice, mae]}
engine: {name: numpy, dtype: float64}
run: {progress: none}
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    with h5py.File(tmp_path / "d.h5", "w") as f:
        for split, n in (("train", 7), ("test", 4)):
            g = f.create_group(split)
            g["scans"] = rng.integers(-99, 999, (n, 6, 5, 4, 1)).astype(np.int16)
            g["scans"].attrs.update(mean=[400.0], std=[300.0])
            g["facts"] = rng.standard_normal((n, 3)).astype(np.float32)
            g["facts"].attrs.update(mean=[0.5, 0.0, -1.0], std=[2.0, 1.0, 1.0])
            mask = rng.integers(0, 3, (n, 6, 5, 4)).astype(np.uint8)
            mask[:, 0, 0] = 255
            g["mask"], g["size"] = mask, rng.standard_normal((n, 2)).astype(np.float32)
    return tmp_path / "d.h5"


def files(data: Path, *more: str) -> list[str]:
    return [f"data.train={data}", f"data.test={data}", "data.x={image: scans}", *more]


NUMBERS = ("loss", "seg_loss", "size_loss", "seg_accuracy", "test_seg_dice", "test_size_mae", "test_loss")


def numbers(trainer: Trainer) -> list[dict[str, Any]]:
    return [{n: record[n] for n in NUMBERS} for record in trainer.train()]


PLANS = {
    1: ["parallel.strategy=data"],
    2: ["parallel.strategy=spatial"],
    3: ["parallel.strategy=data"],
    4: ["parallel={strategy: data, layers: {body: {D: 2, H: 2}, seg: {D: 4}, known: {F: 4}, size: {F: 2}}}"],
}


def test_stages_train_alike(data: Path) -> None:
    """Of micro-batches, each has its part of every loss."""
    plain = run_file(files(data, "train.losses.seg.loss={name: cross_entropy}", "data.y={mask: labels}"), RUN)
    with h5py.File(data, "r+") as f:
        for split in ("train", "test"):
            f[f"{split}/labels"] = f[f"{split}/mask"][...] % 3
    staged = ["parallel={strategy: data, stages: 2, micro_batches: 3}", "train.losses.seg.loss={name: cross_entropy}"]
    alone, several = (
        train(plain, 1, numbers),
        train(run_file(files(data, *staged, "data.y={mask: labels}"), RUN), 2, numbers),
    )
    for name, tensor in alone.tensors.items():
        np.testing.assert_allclose(several.tensors[name], tensor, rtol=1e-9, atol=1e-12, err_msg=name)
    for one, other in zip(alone.records, several.records, strict=True):
        assert other == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize("procs", [2, 3, 4])
@pytest.mark.parametrize("more", [[], ["data.augment={flip: [D, W]}", "data.normalise=zscore"]], ids=["", "augmented"])
def test_any_grid_trains_alike(procs: int, more: list[str], data: Path) -> None:
    alone, several = (train(run_file(files(data, *PLANS[p], *more), RUN), p, numbers) for p in (1, procs))
    for name, tensor in alone.tensors.items():
        np.testing.assert_allclose(several.tensors[name], tensor, rtol=1e-9, atol=1e-12, err_msg=name)
    for one, other in zip(alone.records, several.records, strict=True):
        assert other == pytest.approx(one, rel=1e-9)


def test_records_are_of_each_output_and_the_loss_is_their_sum(data: Path) -> None:
    with api.train(run_file(files(data, "train.evaluate.watch=test_seg_dice"), RUN)) as network:
        for record in network.records:
            assert record["loss"] == pytest.approx(record["seg_loss"] + record["size_loss"], rel=1e-12)
            assert record["test_loss"] == pytest.approx(record["test_seg_loss"] + record["test_size_loss"], rel=1e-12)
            assert 0 < record["seg_accuracy"] < 1 and "size_accuracy" not in record and "accuracy" not in record
            assert set(record["test_seg_dice_of"]) == {"0", "1", "2"}
        assert network.trainer.best is not None and network.trainer.best.metric == "test_seg_dice"
        with h5py.File(data) as f:
            test = {n: f[f"test/{n}"][...] for n in ("scans", "facts", "mask", "size")}
        out = network.predict({"image": test["scans"], "facts": test["facts"]})
        assert isinstance(out, dict)
        assert record["test_size_mae"] == pytest.approx(np.abs(out["size"] - test["size"]).mean(), rel=1e-6)
        assert record["test_size_loss"] == pytest.approx(0.5 * ((out["size"] - test["size"]) ** 2).mean(), rel=1e-6)
        known = test["mask"] != 255
        assert record["test_seg_accuracy"] == (out["seg"].argmax(-1) == test["mask"])[known].mean()
        weights = network.weights()
        facts = (test["facts"] - [0.5, 0, -1]) / [2, 1, 1]
        image = (test["scans"] - 400.0) / 300.0
        body = network.predict({"image": image, "facts": facts}, normalised=True)
        np.testing.assert_allclose(body["size"], out["size"], rtol=1e-9)
        del weights


@pytest.mark.parametrize("procs", [1, 2, 4])
def test_predictions_are_a_dataset_for_each_output(procs: int, data: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "p.h5"
    with api.train(run_file(files(data, f"run.out={run}"), RUN), write=True) as network:
        with h5py.File(data) as f:
            want: Any = network.predict({"image": f["test/scans"][...], "facts": f["test/facts"][...]})
        measured = network.evaluate()

    def rank(transport: Transport) -> None:
        with api.restore(run, overrides=PLANS[procs], transport=transport) as restored:
            again = restored.evaluate()
            assert again["test_seg_dice"] == pytest.approx(measured["test_seg_dice"], rel=1e-12)
            given = {"image": "scans", "facts": "facts"}
            from lbpar.data.hdf5 import Hdf5Dataset

            inputs = {n: Hdf5Dataset(data, "test", x=x, y=None, dtype=np.float64) for n, x in given.items()}
            restored.predict_to(out, inputs, labels=True)

    VirtualWorld(Grid.of(procs)).run(rank)
    with h5py.File(out) as f:
        assert set(f) == {"seg", "seg_labels", "size"}
        for name in ("seg", "size"):
            np.testing.assert_allclose(f[name][...], want[name], rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(f["seg_labels"][...], want["seg"].argmax(-1))


def test_predictions_see_what_training_saw(data: Path, tmp_path: Path) -> None:
    """A normalisation of pictures; vectors are left as they are by both."""
    run, out = tmp_path / "run", tmp_path / "p.h5"
    api.train(run_file(files(data, "data.normalise={name: zscore}", f"run.out={run}"), RUN), write=True).close()
    assert inference.predict(["--run", str(run), "--input", str(data), "--out", str(out)]) == 0
    with api.restore(run) as network, h5py.File(out) as p, h5py.File(data) as f:
        measured = network.evaluate()
        assert np.abs(p["size"][...] - f["test/size"][...]).mean() == pytest.approx(measured["test_size_mae"], rel=1e-9)


def test_command_lines(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    api.train(run_file(files(data, f"run.out={run}"), RUN), write=True).close()
    assert inference.evaluate(["--run", str(run)]) == 0
    assert "test_seg_dice " in capsys.readouterr().out
    args = ["--run", str(run), "--input", str(data), "--out", str(tmp_path / "p.h5")]
    assert inference.predict(args) == 0
    assert "p.h5: seg 4 x 6 x 5 x 4 x 3, size 4 x 2, float64" in capsys.readouterr().out
    with pytest.raises(DataError, match="outputs seg, size, which only HDF5 takes"):
        inference.predict([*args[:-1], str(tmp_path / "p.npy")])
    np.save(tmp_path / "x.npy", np.zeros((2, 6, 5, 4, 1)))
    with pytest.raises(DataError, match="expected an HDF5 file with the network's inputs image, facts"):
        inference.predict([*args[:3], str(tmp_path / "x.npy"), *args[4:]])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("data.x={pictures: scans}", ConfigError, "data.x: got 'pictures', .*expected some of image, facts"),
        ("data.x=scans", ConfigError, "data.x: got scans, expected a mapping"),
        ("data.y={masks: mask}", ConfigError, "data.y: got 'masks', did you mean 'mask'"),
        ("data.x={image: facts}", DataError, r"samples have the shape \(3,\), expected \(6, 5, 4, 1\)"),
        ("train.losses={seg: {loss: dice}, size: {loss: mse}}", DataError, "no dataset 'seg'"),
        ("train.losses={seg: {loss: dice}}", ConfigError, "train.losses: got none for size, expected one for each"),
        ("train.losses={sog: {loss: dice}}", ConfigError, "got 'sog', did you mean 'seg'"),
        ("train.losses={}", ConfigError, "train.losses: not given, but the network has the outputs seg, size"),
        ("train.loss=mse", ConfigError, "got loss and losses"),
        ("train.evaluate.metrics=[dice, iou, confusion, rmse, balanced_accuracy]", None, ""),
        ("train.losses={seg: {loss: dice, target: mask}, size: {loss: huber}}", DataError, "label 255"),
        (
            "train.evaluate.watch=test_accuracy",
            ConfigError,
            "test_accuracy is one of each output, as test_seg_accuracy",
        ),
        (
            "train.evaluate.watch=test_size_accuracy",
            ConfigError,
            "test_size_accuracy is not measured with loss mse; watch test_size_loss",
        ),
        (
            "train.evaluate.watch=test_size_dice",
            ConfigError,
            "test_size_dice is not measured with loss mse; watch another",
        ),
        ("train.evaluate.watch=test_other_dice", ConfigError, "expected a number of an output in train.losses"),
        (
            "data.patches={per_sample: 2}",
            DataError,
            "inputs image .6, 5, 4, 1., facts .3,., expected pixels or voxels of one size",
        ),
        ("model.outputs=[seg, sise]", ConfigError, "outputs: got 'sise', did you mean 'size'"),
        ("model.input={image: [6, 5, 4, 1], facts: [3], age: [1]}", GraphError, "model.input.age: no layer reads"),
    ],
)
def test_what_does_not_fit_is_refused(change: str, error: Any, message: str, data: Path) -> None:
    def go() -> None:
        api.train(run_file(files(data, change), RUN))

    if error is None:
        go()
    else:
        with pytest.raises(error, match=message):
            go()


def test_vectors_are_not_normalised_by_themselves_and_masks_move_with_pictures(data: Path) -> None:
    """Whatever comes first."""
    first = RUN.replace("{image: [6, 5, 4, 1], facts: [3]}", "{facts: [3], image: [6, 5, 4, 1]}").replace(
        "name: body", "name: body, from: image"
    )
    more = ["data.normalise={name: zscore}", "data.augment={flip: [W], crop_pad: 1}"]
    one, voxels = np.array([2]), (((0, 6),), ((0, 5),), ((0, 4),))
    with h5py.File(data, "r+") as f:
        g = f["train"]
        g["scans"][...] = g["mask"][...][..., None]
        facts = (g["facts"][2] - g["facts"].attrs["mean"]) / g["facts"].attrs["std"]

    def look(trainer: Trainer) -> list[dict[str, Any]]:
        assert isinstance(trainer.dataset, NamedDataset)
        np.testing.assert_allclose(trainer.dataset.part("facts").read(one, (((0, 3),),))[0], facts, rtol=1e-6)
        plain, moved = trainer.dataset, False
        for epoch in range(8):
            seen = augmented(plain, trainer.config.data.augment, 5, epoch)
            image = seen.part("image").read(one, (*voxels, ((0, 1),)))[0, ..., 0]
            mask = seen.part("target/mask").read_targets(one, voxels)[0]
            moved |= not np.array_equal(image, plain.part("image").read(one, (*voxels, ((0, 1),)))[0, ..., 0])
            assert [np.unique(image[mask == c]).size for c in (1, 2)] == [1, 1]  # each label where its grey value is
        assert moved
        return []

    train(run_file(files(data, *more), first), 1, look)
