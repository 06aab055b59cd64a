"""HDF5 files made anew: names, types, chunks, a share for tests; and CIFAR's binary files."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from lbpar.data.__main__ import main
from lbpar.data.hdf5 import Hdf5Dataset

RNG = np.random.default_rng(2)
X = RNG.integers(0, 256, (10, 4, 3, 2), np.uint8)
Y = np.arange(10) % 3


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "old.h5", "w") as f:
        f["images"], f["names"] = X, Y
        f["images"].attrs["mean"], f["names"].attrs["classes"] = [0.5, 0.25], 3
    return tmp_path / "old.h5"


def test_names_types_chunks_and_shares(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new.h5"
    options = ["--x", "images", "--y", "names", "--type", "float32", "--test-share", "0.3", "--gzip"]
    assert main(["convert", str(old), "--out", str(new), *options]) == 0
    assert "7 of 10 samples" in capsys.readouterr().out
    train, test, whole = Hdf5Dataset(new, "train"), Hdf5Dataset(new, "test"), Hdf5Dataset(old, x="images", y="names")
    assert (
        (len(train), len(test), train.classes) == (7, 3, 3) and "gzip" in train.storage and "float32" in train.storage
    )
    seen = np.concatenate([train.read(np.arange(7)), test.read(np.arange(3))])
    labels = np.concatenate([train.read_targets(np.arange(7)), test.read_targets(np.arange(3))])
    want, numbers = whole.read(np.arange(10)), []
    for x, y in zip(seen, labels, strict=True):  # read as the old file is: scaled by 1/255, less the mean
        (i,) = np.flatnonzero((np.abs(want - x) < 1e-6).all(axis=(1, 2, 3)))
        numbers.append(i)
        assert y == Y[i]
    assert sorted(numbers) == list(range(10)) and numbers[:7] == sorted(numbers[:7])
    again = tmp_path / "again.h5"
    main(["convert", str(old), "--out", str(again), *options])
    np.testing.assert_array_equal(Hdf5Dataset(again, "test").read(np.arange(3)), test.read(np.arange(3)))


def test_splits_stay(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "two.h5", "w") as f:
        for name, part in (("train", slice(0, 6)), ("test", slice(6, 10))):
            f[f"{name}/x"], f[f"{name}/y"] = X[part].astype(np.float32), X[part][..., 0].astype(np.float32)
    assert main(["convert", str(tmp_path / "two.h5"), "--out", str(tmp_path / "new.h5"), "--type", "uint8"]) == 0
    new = Hdf5Dataset(tmp_path / "new.h5", "test")
    assert "uint8" in new.storage and new.classes is None
    np.testing.assert_array_equal(new.read(np.arange(4)), X[6:])  # not scaled, as before
    np.testing.assert_array_equal(new.read_targets(np.arange(4)), X[6:, ..., 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--x", "images", "--y", "names", "--type", "int8"], "which int8 cannot hold"),
        (["--x", "images", "--y", "names", "--test-share", "0.01"], "leaves one split empty"),
        (["--y", "names"], "no dataset 'x'"),
        (["--x", "images", "--y", "names", "--out-is-source"], "another name for the new one"),
    ],
)
def test_what_cannot_be_done_is_refused(
    options: list[str], message: str, old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = old if "--out-is-source" in options else tmp_path / "new.h5"
    options = [o for o in options if o != "--out-is-source"]
    assert main(["convert", str(old), "--out", str(out), *options]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "new.h5").exists()


@pytest.mark.parametrize("kind", [10, 100])
def test_cifar(kind: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, labels = tmp_path / "cifar", 1 if kind == 10 else 2
    folder.mkdir()
    files = (
        [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"] if kind == 10 else ["train.bin", "test.bin"]
    )
    names = [f"class{i}" for i in range(kind)]
    (folder / ("batches.meta.txt" if kind == 10 else "fine_label_names.txt")).write_text("\n".join(names) + "\n\n")
    records = []
    for i, file in enumerate(files):
        raw = RNG.integers(0, 256, (i + 2, labels + 3072), np.uint8)
        raw[:, :labels] %= kind
        (folder / file).write_bytes(raw.tobytes())
        records.append(raw)
    assert main(["convert", str(folder), "--out", str(tmp_path / "c.h5")]) == 0
    assert f"{kind} classes" in capsys.readouterr().out
    for split, own in (("train", np.concatenate(records[:-1])), ("test", records[-1])):
        data = Hdf5Dataset(tmp_path / "c.h5", split)
        assert data.class_names == tuple(names) and data.sample_shape == (32, 32, 3)
        pictures = own[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        np.testing.assert_allclose(data.read(np.arange(len(own))), pictures / 255, rtol=1e-6)
        np.testing.assert_array_equal(data.read_targets(np.arange(len(own))), own[:, labels - 1])
    (folder / files[0]).write_bytes(b"123")
    assert main(["convert", str(folder), "--out", str(tmp_path / "d.h5")]) == 2
    assert "expected a multiple of" in capsys.readouterr().err
