"""The command line: make, convert, info."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from lbpar.data.__main__ import main
from lbpar.data.formats.idx import read_idx
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.synthetic import SyntheticDataset
from lbpar.errors import DataError


def all_of(path: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    data = Hdf5Dataset(path, split, dtype=np.float64)
    n = np.arange(len(data))
    return data.read(n), data.read_targets(n)


def idx(array: np.ndarray, code: int = 8) -> bytes:
    return bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_digits(tmp_path, capsys) -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    path = tmp_path / "sub" / "digits.h5"
    assert main(["make", "digits", "--out", str(path)]) == 0
    assert "/train: 1,198 samples 8 x 8 x 1, float32" in capsys.readouterr().out
    images, labels = sklearn.load_digits(return_X_y=True)
    for split, pick in (("train", np.arange(1797) % 3 != 2), ("test", np.arange(1797) % 3 == 2)):
        x, y = all_of(path, split)
        np.testing.assert_array_equal(x, images[pick].reshape(-1, 8, 8, 1) / 16)
        np.testing.assert_array_equal(y, labels[pick])
    assert main(["make", "digits64", "--gzip", "--overwrite", "--out", str(path)]) == 0
    x, _ = all_of(path, "test")
    assert x.shape == (599, 64, 64, 1)
    np.testing.assert_array_equal(x[:, 4::8, 4::8, 0], images[pick].reshape(-1, 8, 8) / 16)
    assert [p.name for p in path.parent.iterdir()] == ["digits.h5"]


def test_synthetic(tmp_path) -> None:
    path = tmp_path / "s.h5"
    common = [
        "make",
        "synthetic",
        "--shape",
        "4",
        "5",
        "6",
        "2",
        "--samples",
        "9",
        "--test-samples",
        "3",
        "--per-voxel",
    ]
    assert main([*common, "--classes", "3", "--out", str(path)]) == 0
    x, y = all_of(path, "train")
    expected = SyntheticDataset(9, (4, 5, 6, 2), (4, 5, 6), 3, distinct=9)
    np.testing.assert_array_equal(x, expected.read(np.arange(9)))
    np.testing.assert_array_equal(y, expected.read_targets(np.arange(9)))
    assert len(all_of(path, "test")[0]) == 3
    assert main([*common, "--uint8", "--overwrite", "--out", str(path)]) == 0
    x, _ = all_of(path, "train")
    assert abs(x.mean() - 0.5) < 0.02


IMAGES = np.random.default_rng(2).integers(0, 256, (6, 5, 4), np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2], np.uint8)


def test_idx_directory(tmp_path, capsys) -> None:
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(IMAGES)))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(LABELS)))
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(IMAGES[:2]))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(LABELS[:2]))
    out = tmp_path / "o.h5"
    assert main(["convert", str(tmp_path), "--out", str(out)]) == 0
    assert "/test: 2 samples 5 x 4 x 1, uint8" in capsys.readouterr().out
    x, y = all_of(out, "train")
    np.testing.assert_allclose(x, IMAGES[..., None] / 255, rtol=1e-15)
    np.testing.assert_array_equal(y, LABELS)
    assert main(["convert", str(tmp_path), "--normalise", "--gzip", "--overwrite", "--out", str(out)]) == 0
    x, _ = all_of(out, "train")
    assert abs(x.mean()) < 1e-12
    assert abs(x.std() - 1) < 1e-12
    plain = IMAGES / 255
    np.testing.assert_allclose(all_of(out, "test")[0][..., 0], (plain[:2] - plain.mean()) / plain.std(), rtol=1e-12)


def test_pairs_and_npz(tmp_path) -> None:
    images, labels, out = tmp_path / "i", tmp_path / "l", tmp_path / "o.h5"
    images.write_bytes(idx(IMAGES))
    labels.write_bytes(idx(LABELS))
    assert main(["convert", str(images), str(labels), "--split", "test", "--out", str(out)]) == 0
    np.testing.assert_array_equal(all_of(out, "test")[1], LABELS)

    x = np.random.default_rng(0).standard_normal((6, 3, 5, 4))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", LABELS[:, None])
    pair = [str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    assert main(["convert", *pair, "--channels", "first", "--overwrite", "--out", str(out)]) == 0
    np.testing.assert_array_equal(all_of(out, "train")[0], np.moveaxis(x, 1, -1))

    np.savez(tmp_path / "a.npz", x_train=IMAGES, y_train=LABELS, x_test=IMAGES[:1], y_test=LABELS[:1])
    assert main(["convert", str(tmp_path / "a.npz"), "--overwrite", "--out", str(out)]) == 0
    assert all_of(out, "test")[0].shape == (1, 5, 4, 1)
    np.savez(tmp_path / "b.npz", X=x, Y=x[:, 0])
    assert main(["convert", str(tmp_path / "b.npz"), "--channels", "last", "--overwrite", "--out", str(out)]) == 0
    np.testing.assert_array_equal(all_of(out, "train")[1], x[:, 0])


def test_image_folders(tmp_path) -> None:
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "test"):
        for c, name in enumerate(["cat", "dog"]):
            folder = tmp_path / "pics" / split / name
            folder.mkdir(parents=True)
            image.fromarray(IMAGES[c]).save(folder / "0.png")
    out = tmp_path / "o.h5"
    assert main(["convert", str(tmp_path / "pics"), "--out", str(out)]) == 0
    x, y = all_of(out, "test")
    np.testing.assert_allclose(x[..., 0], IMAGES[:2] / 255, rtol=1e-15)
    assert y.tolist() == [0, 1]


def refused(capsys, *argv: str) -> str:
    try:
        code = main(list(argv))
    except SystemExit as e:
        code = int(str(e.code))
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("lbpar: error: ")
    assert err.count("\n") == 1
    return err


def test_refusals(tmp_path, capsys) -> None:
    out = str(tmp_path / "o.h5")
    assert "invalid choice: 'digit'" in refused(capsys, "make", "digit", "--out", out)
    assert "multiple of 8" in refused(capsys, "make", "digits", "--size", "12", "--out", out)
    assert "sizes of at least 1" in refused(capsys, "make", "synthetic", "--shape", "0", "3", "--out", out)
    assert "no such file" in refused(capsys, "info", str(tmp_path / "no.h5"))
    assert "no such file" in refused(capsys, "convert", str(tmp_path / "no"), "--out", out)
    assert "expected IDX files" in refused(capsys, "convert", str(tmp_path), "--out", out)
    np.savez(tmp_path / "a.npz", pics=IMAGES)
    assert "got the arrays pics, expected x and y" in refused(capsys, "convert", str(tmp_path / "a.npz"), "--out", out)
    (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:50])
    assert "cannot be read as an NPZ" in refused(capsys, "convert", str(tmp_path / "b.npz"), "--out", out)
    np.savez(tmp_path / "c.npz", x=IMAGES, y=LABELS[:2])
    assert "has the shape (2,), expected one entry per sample of 'x' (6)" in refused(
        capsys, "convert", str(tmp_path / "c.npz"), "--out", out
    )
    np.savez(tmp_path / "d.npz", x=IMAGES, y=-LABELS.astype(int))
    assert "got the label -2" in refused(capsys, "convert", str(tmp_path / "d.npz"), "--out", out)
    np.savez(tmp_path / "e.npz", x=IMAGES, y=LABELS)
    assert "got the label 2" in refused(capsys, "convert", str(tmp_path / "e.npz"), "--classes", "2", "--out", out)
    np.savez(tmp_path / "f.npz", x=IMAGES.astype(complex), y=LABELS)
    assert "type complex128, expected whole or real numbers" in refused(
        capsys, "convert", str(tmp_path / "f.npz"), "--out", out
    )
    assert not [p for p in tmp_path.iterdir() if "o.h5" in p.name], "nothing may be left behind"


def test_idx_types_and_damage(tmp_path) -> None:
    path = tmp_path / "a"
    path.write_bytes(idx(np.arange(6).reshape(2, 3).astype(">i4"), 0x0C))
    got = read_idx(path)
    assert got.dtype == np.int32
    assert got.tolist() == [[0, 1, 2], [3, 4, 5]]
    for content, words in [
        (idx(IMAGES)[:-1], "expected 136 for an array"),
        (idx(IMAGES)[:6], "bytes, expected"),
        (gzip.compress(idx(IMAGES))[:-20], "truncated"),
        (b"hello world", "not an IDX file"),
        (b"", "not an IDX file"),
    ]:
        path.write_bytes(content)
        with pytest.raises(DataError, match=words):
            read_idx(path)
