"""The samples of many files read as those of one."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.many_files import ManyFiles
from lbpar.errors import ConfigError, DataError
from tests.util.training import run_file, train

RNG = np.random.default_rng(4)
X = RNG.standard_normal((6, 3, 4, 5, 1)).astype(np.float32)
Y = (X[..., 0] > 0).astype(np.uint8)
PARTS = {"a.h5": slice(0, 1), "b.h5": slice(1, 4), "c.h5": slice(4, 6)}
RUN = """
model: {input: [3, 4, 5, 1], layers: [{op: conv, filters: 2, kernel: 3, pad: 1, name: last}]}
train: {batch: 4, epochs: 2, seed: 5, loss: dice, optimizer: {name: sgd, lr: 0.1}}
engine: {name: numpy, dtype: float64}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vol").mkdir()
    for name, part in PARTS.items():
        with h5py.File(tmp_path / "vol" / name, "w") as f:
            group = f.create_group("train") if name == "b.h5" else f
            group["x"], group["y"] = X[part], Y[part]
            group["x"].attrs["mean"], group["y"].attrs["classes"] = [0.5], 2
    with h5py.File(tmp_path / "one.h5", "w") as f:
        f["x"], f["y"] = X, Y
        f["x"].attrs["mean"], f["y"].attrs["classes"] = [0.5], 2
    return tmp_path


def test_many_files_read_as_one(folder: Path) -> None:
    many, one = ManyFiles((f"{folder}/vol/*.h5",)), Hdf5Dataset(folder / "one.h5")
    assert len(many) == 6 and many.sample_shape == one.sample_shape and many.classes == 2
    assert many.normalisation == one.normalisation
    box = (((1, 3),), ((0, 4),), ((0, 2), (3, 4)), ((0, 1),))
    for samples in (np.arange(6), np.array([5, 0, 3, 3])):
        np.testing.assert_array_equal(many.read(samples, box), one.read(samples, box))
        np.testing.assert_array_equal(many.read_targets(samples, box[:-1]), one.read_targets(samples, box[:-1]))
    many.close()
    np.testing.assert_array_equal(many.read(np.array([4])), one.read(np.array([4])))  # opens again
    backwards = ManyFiles((f"{folder}/vol/c.h5", f"{folder}/vol/a.h5"))
    np.testing.assert_array_equal(backwards.read(np.array([2, 0])), one.read(np.array([0, 4])))


@pytest.mark.parametrize("procs", [1, 4])
def test_a_run_trains_on_many_files_as_on_one(procs: int, folder: Path) -> None:
    plan = "parallel={strategy: spatial}"
    files = f"data.train={{files: ['{folder}/vol/a.h5', '{folder}/vol/[bc].h5']}}"
    many = train(run_file([plan, files], RUN), procs)
    one = train(run_file([plan, f"data.train={folder}/one.h5"], RUN), procs)
    assert many.records == one.records
    assert run_file([files], RUN).data.train == (f"{folder}/vol/a.h5", f"{folder}/vol/[bc].h5")


def spoil(folder: Path, what: str) -> None:
    with h5py.File(folder / "vol" / "c.h5", "a") as f:
        match what:
            case "shape":
                del f["x"], f["y"]
                f["x"], f["y"] = X[4:, :2], Y[4:, :2]
                f["x"].attrs["mean"] = [0.5]
            case "type":
                del f["y"]
                f["y"] = Y[4:].astype(np.int64)
            case "mean":
                f["x"].attrs["mean"] = [0.25]
            case "missing":
                del f["y"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"c\.h5: shape: got \(2, 4, 5, 1\), expected \(3, 4, 5, 1\) as in .*a\.h5"),
        ("type", r"c\.h5: type: got int64, expected uint8"),
        ("mean", r"c\.h5: mean: got \[0.25\], expected \[0.5\]"),
        ("missing", r"c\.h5:/: no dataset 'y'"),
    ],
)
def test_files_that_differ_are_refused(what: str, message: str, folder: Path) -> None:
    spoil(folder, what)
    with pytest.raises(DataError, match=message):
        ManyFiles((f"{folder}/vol/*.h5",))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("nothing*.h5",), "no file is called nothing"),
        (("vol/a.h5", "vol/*.h5"), r"vol/a\.h5 comes twice"),
        (("vol/d.h5",), "no such file"),
    ],
)
def test_lists_that_name_no_data_are_refused(files: Any, message: str, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=message):
        ManyFiles(files)
    with pytest.raises(ConfigError, match="expected a file, or {files"):
        run_file(["data.train={file: 3}"], RUN)


def test_another_process_may_read_the_same_files(folder: Path) -> None:
    many, one = ManyFiles((f"{folder}/vol/*.h5",)), Hdf5Dataset(folder / "one.h5")
    with (folder / "vol/b.h5").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # as HDF5 does in each process that reads
        np.testing.assert_array_equal(many.read(np.arange(6)), one.read(np.arange(6)))
