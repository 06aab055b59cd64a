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


def test_several_inputs_and_targets_keep_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts, size = RNG.standard_normal((10, 5)).astype(np.float32), RNG.standard_normal((10, 2))
    with h5py.File(tmp_path / "old.h5", "w") as f:
        f["image"], f["facts"], f["mask"], f["size"], f["kind"] = X, facts, X[..., 0] % 3, size, Y
        f["kind"].attrs["classes"] = ["a", "b", "c", "d"]
    options = ["--x", "image,facts", "--y", "mask,size,kind", "--test-share", "0.3", "--chunk", "2", "--normalise"]
    assert main(["convert", str(tmp_path / "old.h5"), "--out", str(tmp_path / "new.h5"), *options]) == 0
    said = capsys.readouterr().out
    assert "facts: 5, float32, gzip chunks (1, 2)" in said and "kind: labels one per sample" in said
    with h5py.File(tmp_path / "new.h5") as f:
        assert set(f["train"]) == set(f["test"]) == {"image", "facts", "mask", "size", "kind"}
        assert f["train/image"].chunks == (1, 2, 3, 2) and f["train/kind"].attrs["classes"].tolist() == [
            b"a",
            b"b",
            b"c",
            b"d",
        ]
        all_facts = np.concatenate([f["train/facts"], f["test/facts"]])
        order = [int(np.flatnonzero((facts == row).all(1))[0]) for row in all_facts]
        assert sorted(order) == list(range(10))
        for name, source in (("image", X), ("mask", X[..., 0] % 3), ("size", size), ("kind", Y)):
            np.testing.assert_array_equal(np.concatenate([f[f"train/{name}"], f[f"test/{name}"]]), source[order])
            assert f[f"train/{name}"].dtype == source.dtype
        for name, source, scale in (("image", X, 255), ("facts", facts, 1)):  # of the training split, in both
            own = source[order[:7]].astype(float).reshape(-1, source.shape[-1]) / scale
            np.testing.assert_allclose(f[f"test/{name}"].attrs["mean"], own.mean(0), rtol=1e-12)
            np.testing.assert_allclose(f[f"test/{name}"].attrs["std"], own.std(0), rtol=1e-12)
    with h5py.File(tmp_path / "old.h5", "a") as f:
        del f["facts"]
        f["facts"] = facts[:9]
    assert main(["convert", str(tmp_path / "old.h5"), "--out", str(tmp_path / "odd.h5"), *options[:4]]) == 2
    assert "'facts' has 9 samples, expected 10 as 'image'" in capsys.readouterr().err
    assert (
        main(["convert", str(tmp_path / "old.h5"), "--out", str(tmp_path / "odd.h5"), "--x", "image", "--chunk", "0"])
        == 2
    )
    assert "expected whole numbers above 0" in capsys.readouterr().err


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
        (
            ["--x", "images", "--y", "names", "--test-share", "1.5"],
            "got the test share 1.5, expected a number between 0",
        ),
        (["--x", "images", "--y", "names", "--test-share", "nan"], "got the test share nan"),
        (["--y", "names"], "no dataset 'x'. There are"),
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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("old_type", "value", "new_type"),
    [
        ("f4", np.nan, "int16"),
        ("f8", -np.inf, "uint8"),
        ("f4", 0.5, "int32"),
        ("f8", 1e6, "float16"),
        ("i4", 70_000, "float16"),
        ("i1", -1, "uint16"),
        ("u4", 2**31, "int32"),
    ],
)
def test_a_value_that_a_type_cannot_hold_is_named(
    old_type: str, value: float, new_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.ones((5, 3, 4, 2), old_type)
    x[3, 2, 1, 0] = value
    if old_type == "f8":
        x[4, 0, 0, 0] = np.nan  # hides nothing
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["x"], f["y"] = x, np.arange(5)
    assert main(["convert", str(tmp_path / "a.h5"), "--out", str(tmp_path / "b.h5"), "--type", new_type]) == 2
    said = capsys.readouterr().err
    assert (
        f"a.h5:/: sample 3 has the value {x[3, 2, 1, 0]} of type {x.dtype} at (2, 1, 0), which {new_type} cannot"
        in said
    )
    assert not (tmp_path / "b.h5").exists()


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


def test_more_numbers_of_a_chunk_than_dimensions_are_refused(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "odd.h5"), "--x", "images", "--y", "names"]
    assert main(["convert", str(old), *out, "--chunk", "2", "2", "2", "1", "1"]) == 2
    assert (
        "got the chunk [2, 2, 2, 1, 1], expected 3 numbers at most, one for each dimension" in capsys.readouterr().err
    )
    assert not (tmp_path / "odd.h5").exists()
