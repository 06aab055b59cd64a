"""Volumes of different sizes, a file each: trained by patches, evaluated and predicted whole, the same on any grid and against plain NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lbpar import api, inference
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.open import open_files
from lbpar.data.patches.cut import Patched
from lbpar.data.subset import Subset
from lbpar.data.uneven import UnevenFiles
from lbpar.errors import DataError
from lbpar.study.slices import slices
from lbpar.train.trainer import Trainer
from tests.runtime.test_scores import means, per_volume
from tests.train.test_patches import RUN, blended, train
from tests.util import training
from tests.util.training import run_file

RNG = np.random.default_rng(8)
SIZES = [(9, 7, 8), (4, 5, 4), (6, 11, 5), (5, 5, 9)]
XS = [RNG.standard_normal((*s, 2)) for s in SIZES]
YS = [(x[..., 0] > 0.8).astype(np.uint8) + (x[..., 1] > 1.2).astype(np.uint8) for x in XS]
PATCH = (4, 5, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, (x, y) in enumerate(zip(XS, YS, strict=True)):
        with h5py.File(tmp_path / f"{i}.h5", "w") as f:
            f["x"], f["y"] = x[None], y[None]
            f["x"].attrs["mean"] = [0.1, 0.0]
    return tmp_path


@pytest.fixture(autouse=True)
def all_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        training, "MEASURED", (*training.MEASURED, "test_dice", "test_confusion", "test_dice_per_volume")
    )


def changes(folder: Path, *more: str) -> list[str]:
    return [f"data.train={{files: '{folder}/[0-2].h5'}}", f"data.test={{files: '{folder}/[1-3].h5'}}", *more]


def test_files_are_read_one_after_the_other_each_in_its_own_size(folder: Path) -> None:
    data = UnevenFiles((f"{folder}/*.h5",), dtype=np.float64)
    assert len(data) == 4 and data.sample_shape == (9, 11, 9, 2) and data.target_shape == (9, 11, 9)
    assert [data.extents(n) for n in range(4)] == SIZES
    for n in (3, 0, 2):
        box = tuple(((0, e),) for e in SIZES[n])
        np.testing.assert_allclose(data.read(np.array([n]), (*box, ((0, 2),)))[0], XS[n] - [0.1, 0.0])
        np.testing.assert_array_equal(data.read_targets(np.array([n]), box)[0], YS[n])
    assert data.bytes_read.tolist() == 2 * [sum(XS[n].nbytes + YS[n].nbytes for n in (3, 0, 2))]
    with pytest.raises(DataError, match=r"inside 0\.\.4"):
        data.read(np.array([1]), (((0, 9),), ((0, 7),), ((0, 4),), ((0, 2),)))
    runs = [(start, one.sample_shape, list(there)) for start, one, there in Subset(data, [2, 0]).alike(range(2))]
    assert runs == [(0, (6, 11, 5, 2), [0]), (1, (9, 7, 8, 2), [0])]
    drawn = [Patched(data, PATCH, run_file([], RUN).data.patches, {}, s).place(n) for s in range(50) for n in range(8)]  # type: ignore[arg-type]
    for n, size in enumerate(SIZES):
        origins = np.array([origin for sample, origin in drawn if sample == n])
        assert (origins.min(0) == 0).all() and (origins.max(0) == np.subtract(size, PATCH)).all()


@pytest.mark.parametrize(
    ("procs", "plan"),
    [
        (1, "{}"),
        (2, "{strategy: spatial}"),
        (3, "{strategy: data}"),
        (4, "{strategy: data, layers: {low: {F: 2, D: 2}, last: {F: 4}}}"),
    ],
)
def test_any_grid_trains_evaluates_and_predicts_alike(procs: int, plan: str, folder: Path, tmp_path: Path) -> None:
    def job(trainer: Trainer) -> Any:
        given = UnevenFiles((f"{folder}/[1-3].h5",), "test", y=None, dtype=np.float64)
        trainer.predict_to(tmp_path / f"{procs}.npy", given)
        return trainer.predict(given), slices(trainer, [2, 0])

    more = "{rotate: {low: -10, high: 10}, flip: [D], border: nearest}"
    tensors, records, found = train(
        run_file(changes(folder, f"data.augment={more}", f"parallel={plan}"), RUN), procs, job
    )
    same, alone, _ = train(run_file(changes(folder, f"data.augment={more}"), RUN), 1, lambda t: None)
    for name, tensor in same.items():
        np.testing.assert_allclose(tensors[name], tensor, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(records[-1]["test_loss"], alone[-1]["test_loss"], rtol=1e-8)

    def window(x: np.ndarray) -> np.ndarray:
        wide = np.pad(x - [0.1, 0.0], ((1, 1), (1, 1), (1, 1), (0, 0)))
        w, d, h, v = tensors["low.weight"], *x.shape[:-1]
        y = tensors["low.bias"] + sum(
            wide[i : i + d, j : j + h, k : k + v] @ w[:, i, j, k].T
            for i in range(3)
            for j in range(3)
            for k in range(3)
        )
        return np.maximum(y, 0) @ tensors["last.weight"][:, 0, 0, 0].T + tensors["last.bias"]

    out, confusion, each = found[0][0], np.zeros((3, 3), int), []
    np.testing.assert_array_equal(np.load(tmp_path / f"{procs}.npy"), out)
    assert out.shape == (3, 6, 11, 9, 3)
    for got, x, y in zip(out, XS[1:], YS[1:], strict=True):
        want, at = blended(window, x, PATCH, 0.4, 3), tuple(slice(e) for e in x.shape[:-1])
        np.testing.assert_allclose(got[at], want, rtol=1e-9, atol=1e-12)
        assert np.count_nonzero(got) == want.size  # zeros beyond its own size
        np.add.at(confusion, (y, want.argmax(-1)), 1)
        each += [*per_volume(want.argmax(-1)[None], y[None], 3)]
    assert records[-1]["test_dice_per_volume"] == pytest.approx(np.nanmean(means(np.array(each))[1:]), rel=1e-12)
    assert records[-1]["test_confusion"] == confusion.tolist()
    last, first = found[0][1]
    assert (last.sample, first.sample) == (2, 0) and last.truth.shape == (5, 9) and first.image.shape == (5, 4)
    np.testing.assert_array_equal(last.truth, YS[3][last.depth])
    np.testing.assert_array_equal(last.prediction, out[2, last.depth, :5, :9].argmax(-1))


def test_statistics_are_of_each_volume_and_spoilt_ones_are_left_out(folder: Path) -> None:
    with h5py.File(folder / "1.h5", "a") as f:
        f["x"][0, 3, 4, 3, 1] = np.nan
    more = ["data.normalise=zscore", "data.test=null", "train.evaluate={}"]
    got = [
        train(run_file(changes(folder, *more, "data.nan=skip", f"parallel={{strategy: {s}}}"), RUN), p, lambda t: t)
        for p, s in ((1, "data"), (2, "spatial"))
    ]
    trainer = got[0][2][0]
    assert trainer.volumes.numbers.tolist() == [0, 2]
    for n, x in enumerate(XS[:3:2]):
        box = tuple(((0, e),) for e in x.shape)
        want = (x - x.mean((0, 1, 2))) / x.std((0, 1, 2))
        np.testing.assert_allclose(trainer.volumes.read(np.array([n]), box)[0], want, rtol=1e-9)
    for name, tensor in got[0][0].items():
        np.testing.assert_allclose(got[1][0][name], tensor, rtol=1e-9, atol=1e-12)
    (folder / "1.h5").unlink()
    without, _, _ = train(run_file(changes(folder, *more), RUN), 1, lambda t: None)
    for name, tensor in without.items():
        np.testing.assert_allclose(got[0][0][name], tensor, rtol=1e-12)


def test_a_run_goes_on_and_its_predictions_are_those_of_python(folder: Path, tmp_path: Path) -> None:
    out = changes(folder, f"run.out={tmp_path}/run", "run.progress=none")
    with api.train(run_file(out, RUN), write=True) as trained:
        want = trained.evaluate()["test_loss"]
    with api.restore(tmp_path / "run") as network:
        assert network.evaluate()["test_loss"] == pytest.approx(want)
        network.predict_to(tmp_path / "p.h5", Hdf5Dataset(folder / "2.h5", "test", dtype=np.float64), labels=True)
    with h5py.File(tmp_path / "p.h5") as f:
        assert f["labels"].shape == (1, 6, 11, 5)


def test_volumes_of_a_folder_are_each_predicted_in_its_own_size(folder: Path, tmp_path: Path) -> None:
    nib = pytest.importorskip("nibabel")
    (tmp_path / "in").mkdir()
    for i, x in enumerate(XS):
        nib.save(nib.Nifti1Image(x, np.diag([1, -1, 2, 1.0])), tmp_path / f"in/{i}.nii.gz")
    nib.save(nib.Nifti1Image(XS[0][:3], np.eye(4)), tmp_path / "in/small.nii.gz")  # padded to a patch
    out = changes(folder, f"run.out={tmp_path}/run", "run.progress=none")
    with api.train(run_file(out, RUN), write=True) as trained:
        want = [trained.predict(np.ascontiguousarray(x[None, :, ::-1]))[0, :, ::-1] for x in XS]
        small = np.pad(XS[0][:3], ((0, 1), (0, 0), (0, 0), (0, 0)), constant_values=XS[0][:3].min())
        want.append(trained.predict(small[None])[0, :3])
    arguments = ["--run", f"{tmp_path}/run", "--input", f"{tmp_path}/in", "--out", f"{tmp_path}/out"]
    assert inference.predict(arguments) == 0
    for name, expected in zip("0123", want, strict=False):
        got = np.asanyarray(nib.load(tmp_path / f"out/{name}.nii.gz").dataobj)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
    got = np.asanyarray(nib.load(tmp_path / "out/small.nii.gz").dataobj)
    np.testing.assert_allclose(got, want[-1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((1, 5, 5, 5, 3))}, r"channels: got \(3, 3\), expected \(3, 2\)"),
        ({"x": np.zeros((1, 5, 5, 5, 2), np.float32)}, "type: got float32, expected float64"),
        ({"x": np.zeros((1, 3, 5, 5, 2)), "y": np.zeros((1, 3, 5, 5), int)}, r"sample 2 has the shape \(3, 5, 5, 2\)"),
    ],
)
def test_files_that_differ_in_more_than_size_are_refused(change: dict[str, Any], message: str, folder: Path) -> None:
    with h5py.File(folder / "2.h5", "w") as f:
        f["x"], f["y"] = change["x"], change.get("y", np.zeros(change["x"].shape[:-1], np.uint8)).astype(np.uint8)
        f["x"].attrs["mean"] = [0.1, 0.0] if change["x"].shape[-1] == 2 else 0.0
    with pytest.raises(DataError, match=message):
        train(run_file(changes(folder, "data.test=null", "train.evaluate={}"), RUN), 1, lambda t: None)
    with pytest.raises(DataError, match="files of one data set must be alike"):
        open_files((f"{folder}/*.h5",), "train")  # without patches
