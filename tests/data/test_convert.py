"""Arrays from other formats: types, channels, splits, and files that hold some already."""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lbpar.data.__main__ import main
from lbpar.data.convert import convert
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.errors import DataError

RNG = np.random.default_rng(6)
Y = np.arange(6) % 3


def npz(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "a.npz", **arrays)
    return folder / "a.npz"


def x_of(path: Path, split: str = "") -> np.ndarray:
    with h5py.File(path) as file:
        return file[f"{split}/x"][...]


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", ">i2", "i4", "u4", "i8", "f2", ">f4", "f8"])
def test_the_type_of_the_source_is_kept(tmp_path, dtype: str) -> None:
    x = RNG.integers(0, 100, (6, 5, 4)).astype(dtype)
    x[0, 0, 0] = np.finfo(dtype).max if "f" in dtype else np.iinfo(dtype).max
    convert([npz(tmp_path, x=x, y=Y)], tmp_path / "a.h5")
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", Y)
    convert([tmp_path / "x.npy", tmp_path / "y.npy"], tmp_path / "b.h5")
    for name in ("a.h5", "b.h5"):
        got = x_of(tmp_path / name)
        assert got.dtype == np.dtype(dtype).newbyteorder("=")
        np.testing.assert_array_equal(got[..., 0], x)


def test_booleans_and_wide_floats(tmp_path) -> None:
    convert([npz(tmp_path, x=RNG.random((6, 5)) > 0.5, y=Y == 1)], tmp_path / "a.h5")
    data = Hdf5Dataset(tmp_path / "a.h5")
    assert set(np.unique(data.read(np.arange(6)))) == {0, 1}
    assert data.read_targets(np.arange(6)).tolist() == (Y == 1).astype(int).tolist()
    fine = np.full((6, 5), 1 / 3, np.longdouble)
    convert([npz(tmp_path, x=fine, y=Y)], tmp_path / "b.h5")
    assert x_of(tmp_path / "b.h5")[0, 0] == 1 / 3


SPACE = np.zeros((6, 9, 8), int)


@pytest.mark.parametrize(
    ("shape", "y", "channels", "sample"),
    [
        ((6, 7), Y, "auto", (7,)),
        ((6, 9, 8), Y, "auto", (9, 8, 1)),
        ((6, 9, 8, 3), Y, "auto", (9, 8, 3)),
        ((6, 9, 8, 1), Y, "auto", (9, 8, 1)),
        ((6, 4, 4, 1), Y, "auto", (4, 4, 1)),
        ((6, 7, 9, 8, 2), Y, "auto", (7, 9, 8, 2)),
        ((6, 9, 8, 12), SPACE, "auto", (9, 8, 12)),
        ((6, 12, 9, 8), SPACE, "auto", (9, 8, 12)),
        ((6, 4, 9, 8), np.zeros((6, 4, 9, 8), int), "auto", (4, 9, 8, 1)),
        ((6, 3, 9, 8), Y, "first", (9, 8, 3)),
        ((6, 3, 9, 8), Y, "none", (3, 9, 8, 1)),
        ((6, 3, 9, 8), Y, "last", (3, 9, 8)),
        ((6, 9, 8), Y, "last", (9, 8)),
        ((6, 2, 7, 9, 8), Y, "first", (7, 9, 8, 2)),
    ],
)
def test_where_channels_are(tmp_path, shape: tuple[int, ...], y: Any, channels: Any, sample: tuple[int, ...]) -> None:
    convert([npz(tmp_path, x=np.zeros(shape, np.float32), y=y)], tmp_path / "a.h5", channels=channels)
    assert Hdf5Dataset(tmp_path / "a.h5").sample_shape == sample


@pytest.mark.parametrize("shape", [(6, 28, 28, 28), (6, 3, 9, 8), (6, 3, 9, 4), (6, 2, 7, 9, 8), (6, 5, 5, 5, 5)])
def test_channels_in_doubt(tmp_path, shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"say where the channels are: `--channels last` .* `--channels first`") as e:
        convert([npz(tmp_path, x=np.zeros(shape), y=Y)], tmp_path / "a.h5")
    assert ("`--channels none` (volumes without channels)" in str(e.value)) == (len(shape) == 4)


@pytest.mark.parametrize("form", ["x_{}", "{}_x", "images"])
@pytest.mark.parametrize("val", ["val", "valid", "validation"])
def test_arrays_of_all_splits(tmp_path, capsys, form: str, val: str) -> None:
    arrays = {}
    for n, split in enumerate(("train", val, "test"), 1):
        pair = (
            (f"{split}_images", f"{split}_labels")
            if form == "images"
            else (form.format(split), form.format(split).replace("x", "y"))
        )
        arrays.update({pair[0]: np.full((6, 4), n, np.uint8), pair[1]: Y[:, None].astype(np.uint8)})
    path = npz(tmp_path, **arrays, weights=np.zeros(3), extra_x=np.zeros(2))
    assert main(["convert", str(path), "--out", str(tmp_path / "a.h5")]) == 0
    for n, split in enumerate(("train", "val", "test"), 1):
        assert (x_of(tmp_path / "a.h5", split) == n).all()
    out = capsys.readouterr().out
    assert "left out: the arrays weights, extra_x" in out
    assert " -> /val" in out


def test_two_arrays_for_one_split(tmp_path) -> None:
    arrays = {f"{a}_{s}": np.zeros((6, 2), int) if a == "x" else Y for s in ("train", "val", "valid") for a in "xy"}
    with pytest.raises(DataError, match="got x_val and x_valid, which mean the same split"):
        convert([npz(tmp_path, **arrays)], tmp_path / "a.h5")


def idx(array: np.ndarray, code: int) -> bytes:
    return bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_idx_of_more_than_bytes(tmp_path) -> None:
    x, y = RNG.integers(-9, 9, (6, 5, 4)).astype(">i2"), Y.astype(np.uint8)
    for split in ("train", "t10k", "val"):
        (tmp_path / f"emnist-letters-{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(x, 0x0B)))
        (tmp_path / f"emnist-letters-{split}-labels-idx1-ubyte").write_bytes(idx(y, 8))
    (tmp_path / "emnist-letters-train-images-idx3-ubyte").write_bytes(idx(x, 0x0B))
    assert [s.name for s in convert([tmp_path], tmp_path / "a.h5")] == ["train", "val", "test"]
    np.testing.assert_array_equal(x_of(tmp_path / "a.h5", "test")[..., 0], x)
    assert x_of(tmp_path / "a.h5", "val").dtype == np.int16
    (tmp_path / "emnist-digits-train-images-idx3-ubyte").write_bytes(idx(x, 0x0B))
    (tmp_path / "emnist-digits-train-labels-idx1-ubyte").write_bytes(idx(y, 8))
    with pytest.raises(DataError, match="emnist-digits-train and emnist-letters-train for the split train"):
        convert([tmp_path], tmp_path / "b.h5")


def test_splits_one_after_the_other(tmp_path, capsys) -> None:
    """Later splits are read as the first: its mean and deviation, its number of classes."""
    out = str(tmp_path / "a.h5")
    train, test = RNG.normal(5, 2, (6, 4, 3)), RNG.normal(50, 20, (6, 4, 3))
    with_all = ["--out", out, "--channels", "last"]
    assert main(["convert", str(npz(tmp_path, x=train, y=Y)), "--split", "train", "--normalise", *with_all]) == 0
    assert main(["convert", str(npz(tmp_path, x=test, y=Y * 0)), "--split", "test", *with_all]) == 0
    mean, std = train.mean(axis=(0, 1)), train.std(axis=(0, 1))
    for split, x in (("train", train), ("test", test)):
        data = Hdf5Dataset(out, split, dtype=np.float64)
        np.testing.assert_allclose(data.read(np.arange(6)), (x - mean) / std, rtol=1e-12)
        assert data.classes == 3
    before = Path(out).read_bytes()
    for arrays, more, words in [
        ({"x": test, "y": Y}, ["--split", "test"], "it exists and holds /test; `--overwrite`"),
        ({"x": test, "y": Y}, [], "it exists and holds /test, /train"),
        (
            {"x": test[:, :2], "y": Y},
            ["--split", "val"],
            "has samples (2, 3) float64 and labels (), expected (4, 3) float64",
        ),
        ({"x": test.astype(np.float32), "y": Y}, ["--split", "val"], "float32 and labels (), expected (4, 3) float64"),
        ({"x": test, "y": Y * 1.0}, ["--split", "val"], "and real targets (), expected"),
        ({"x": test, "y": Y - 1}, ["--split", "test", "--overwrite"], "got the label -1"),
    ]:
        assert main(["convert", str(npz(tmp_path, **arrays)), *more, *with_all]) == 2
        assert words in capsys.readouterr().err
        assert Path(out).read_bytes() == before
    assert main(["convert", str(npz(tmp_path, x=test, y=Y + 2)), "--split", "test", "--overwrite", *with_all]) == 0
    assert [Hdf5Dataset(out, split).classes for split in ("train", "test")] == [3, 5]
    plain = str(tmp_path / "b.h5")
    assert main(["convert", str(npz(tmp_path, x=train, y=Y)), "--split", "train", "--out", plain]) == 0
    assert main(["convert", str(npz(tmp_path, x=test, y=Y)), "--split", "test", "--out", plain, "--normalise"]) == 2
    assert "b.h5: /train has no mean and deviation" in capsys.readouterr().err


def test_splits_of_one_source_are_alike(tmp_path) -> None:
    arrays = {"x_train": np.zeros((6, 4), np.uint8), "y_train": Y, "x_test": np.zeros((6, 4)), "y_test": Y}
    with pytest.raises(
        DataError, match="split 'test' has samples .* float64 .* expected .* uint8 and labels .* as 'train'"
    ):
        convert([npz(tmp_path, **arrays)], tmp_path / "a.h5")


def test_large_offsets(tmp_path) -> None:
    x = 1e8 + 0.499 * RNG.choice([-1.0, 1.0], (6, 50, 1))
    convert([npz(tmp_path, x=x, y=Y)], tmp_path / "a.h5", channels="last", normalise=True)
    got = Hdf5Dataset(tmp_path / "a.h5").read(np.arange(6))
    np.testing.assert_allclose(got, (x - x.mean()) / x.std(), rtol=1e-5)


def test_what_is_not_finite_is_said(tmp_path, capsys) -> None:
    x = np.zeros((6, 4, 4), np.float32)
    x[2, 0, 0], x[5, 1, 1] = np.nan, np.inf
    path = npz(tmp_path, x=x, y=Y)
    assert main(["convert", str(path), "--out", str(tmp_path / "a.h5")]) == 0
    assert "x is not finite in 2 samples, the first of which is 2" in capsys.readouterr().out
    assert main(["convert", str(path), "--out", str(tmp_path / "b.h5"), "--normalise"]) == 2
    assert "channel 0 of sample 2 holds values that are not finite" in capsys.readouterr().err
    assert not (tmp_path / "b.h5").exists()


@pytest.mark.parametrize("n", [1, 3])
def test_one_sample_of_odd_size(tmp_path, n: int) -> None:
    x = RNG.integers(0, 255, (n, 5, 7, 3), np.uint8)
    convert([npz(tmp_path, x=x, y=np.zeros(n, int))], tmp_path / "a.h5", normalise=True, gzip=True)
    got = Hdf5Dataset(tmp_path / "a.h5", dtype=np.float64).read(np.arange(n))
    np.testing.assert_allclose(got.mean(axis=(0, 1, 2)), 0, atol=1e-12)
    np.testing.assert_allclose(got.std(axis=(0, 1, 2)), 1, rtol=1e-12)


def test_numbers_and_names_of_classes(tmp_path) -> None:
    path = npz(tmp_path, x=np.zeros((6, 4)), y=Y)
    for classes, words in (
        (0, "got 0 classes"),
        (-1, "got -1 classes"),
        (10**30, "classes, expected"),
        (2, "got the label 2, expected 0 to 1"),
    ):
        with pytest.raises(DataError, match=words):
            convert([path], tmp_path / "a.h5", classes=classes)
    convert([path], tmp_path / "a.h5", classes=7)
    assert Hdf5Dataset(tmp_path / "a.h5").classes == 7


def lying_npz(path: Path, header: dict[str, Any]) -> None:
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"fortran_order": False, **header})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", member.getvalue() + bytes(64))
        file.writestr("y.npy", member.getvalue() + bytes(64))


def test_damaged_and_lying_files(tmp_path) -> None:
    path = tmp_path / "a.npz"
    lying_npz(path, {"descr": "<f8", "shape": (10**12,)})
    with pytest.raises(
        DataError, match=r"'x' declares \(1000000000000,\) float64, 8,000,000,000,000 bytes, but holds 64"
    ):
        convert([path], tmp_path / "o.h5")
    lying_npz(path, {"descr": "|O", "shape": (4,)})
    with pytest.raises(DataError, match="cannot be read as an NPZ file"):
        convert([path], tmp_path / "o.h5")
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\1\0" + b"hello")
    np.save(tmp_path / "y.npy", Y)
    with pytest.raises(DataError, match="cannot be read as an NPY file"):
        convert([tmp_path / "x.npy", tmp_path / "y.npy"], tmp_path / "o.h5")
    for x, y in (
        (np.zeros(()), Y),
        (np.zeros((6, 2)), np.zeros(())),
        (np.zeros((6, 2)), np.zeros((5, 2))),
        (np.zeros((6, 0)), Y),
    ):
        with pytest.raises(DataError, match="has the shape"):
            convert([npz(tmp_path, x=x, y=y)], tmp_path / "o.h5")
    one_hot = np.eye(3, dtype=int)[Y]
    with pytest.raises(DataError, match="store the argmax of one-hot labels"):
        convert([npz(tmp_path, x=np.zeros((6, 4, 4)), y=one_hot)], tmp_path / "o.h5")
    for name in ("a\0b", "a\ud800", "a" * 5000, "no"):
        with pytest.raises(DataError, match="no such file"):
            convert([tmp_path / name], tmp_path / "o.h5")
    assert not list(tmp_path.glob("*o.h5*"))


@pytest.mark.parametrize(
    "locale",
    [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}],
)
def test_foreign_names_in_any_locale(tmp_path, locale: dict[str, str]) -> None:
    path = npz(tmp_path, x=np.zeros((6, 4)), y=Y).rename(tmp_path / "Daten ä 数.npz")
    for out, code in (("böse 🐞.h5", 0), ("böse 🐞.h5", 2)):
        run = subprocess.run(
            [sys.executable, "-m", "lbpar.data", "convert", path, "--out", tmp_path / out],
            env={**os.environ, **locale},
            check=False,
            capture_output=True,
        )
        assert run.returncode == code, run.stderr
        assert b"Traceback" not in run.stderr
    assert Hdf5Dataset(tmp_path / "böse 🐞.h5").classes == 3
