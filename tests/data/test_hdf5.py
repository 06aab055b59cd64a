"""Reading HDF5: any box equals the same part of the whole array; wrong files get clear errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lbpar.config.data import DataConfig
from lbpar.data import targets
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.info import describe
from lbpar.data.open import open_dataset
from lbpar.data.targets import check_targets
from lbpar.data.writer import Split, write
from lbpar.errors import DataError
from lbpar.layout.runs import Box, box_shape, indices

RNG = np.random.default_rng(5)
X = RNG.standard_normal((11, 5, 6, 7, 3)).astype(np.float32)
Y = RNG.integers(0, 4, (11, 5, 6, 7))


def part(a: np.ndarray, samples: Any, box: Box) -> np.ndarray:
    """The oracle: plain indexing of the whole array."""
    return a[np.ix_(samples, *(indices(runs) for runs in box))]


def random_box(rng: np.random.Generator, shape: tuple[int, ...]) -> Box:
    """Per dimension zero to two runs."""
    box = []
    for e in shape:
        ends = sorted(rng.integers(0, e + 1, 4).tolist())
        box.append(tuple([(ends[0], ends[1]), (ends[2], ends[3])][: rng.integers(1, 3)]))
    return tuple(box)


@pytest.fixture(params=["plain", "gzip"])
def path(request, tmp_path) -> Path:
    out = tmp_path / "d.h5"
    write(out, [Split("train", X, Y), Split("test", X[::-1], Y[::-1])], classes=4, gzip=request.param == "gzip")
    return out


@pytest.mark.parametrize("cache", [0, 10**9])
def test_any_box_of_any_samples(path: Path, cache: int) -> None:
    data = Hdf5Dataset(path, "train", dtype=np.float64, cache=cache)
    assert (len(data), data.sample_shape, data.target_shape, data.classes) == (11, (5, 6, 7, 3), (5, 6, 7), 4)
    rng = np.random.default_rng(7)
    for _ in range(40):
        box = random_box(rng, data.sample_shape)
        samples = rng.integers(0, 11, rng.integers(0, 9))
        x, y = data.read(samples, box), data.read_targets(samples, box[:-1])
        assert x.shape == (len(samples), *box_shape(box))
        assert x.dtype == np.float64
        assert y.dtype == np.int64
        np.testing.assert_array_equal(x, part(X, samples, box))
        np.testing.assert_array_equal(y, part(Y, samples, box[:-1]))
    np.testing.assert_array_equal(data.read(np.arange(11)), X)


def test_reads_only_the_box(path: Path, monkeypatch) -> None:
    data = Hdf5Dataset(path, "train")
    taken = []
    original = h5py.Dataset.read_direct

    def spy(self, dest, source_sel=None, dest_sel=None):
        taken.append(tuple((s.start, s.stop) for s in source_sel))
        return original(self, dest, source_sel, dest_sel)

    monkeypatch.setattr(h5py.Dataset, "read_direct", spy)
    data.read(np.array([7, 2, 3, 3]), (((1, 2),), ((0, 2), (4, 6)), ((3, 7),), ((0, 3),)))
    assert taken == [
        ((2, 4), (1, 2), (0, 2), (3, 7), (0, 3)),
        ((2, 4), (1, 2), (4, 6), (3, 7), (0, 3)),
        ((7, 8), (1, 2), (0, 2), (3, 7), (0, 3)),
        ((7, 8), (1, 2), (4, 6), (3, 7), (0, 3)),
    ]


def test_cache_reads_once_and_keeps_to_its_room(path: Path, monkeypatch) -> None:
    box: Box = (((0, 5),), ((0, 3),), ((0, 7),), ((0, 3),))
    data = Hdf5Dataset(path, "train", cache=11 * 5 * 3 * 7 * 3 * 4)
    for _ in range(2):  # what is asked for again is kept
        data.read(np.array([1]), box)
    monkeypatch.setattr(Hdf5Dataset, "_slabs", lambda *_: pytest.fail("read again"))
    np.testing.assert_array_equal(data.read(np.array([4, 0]), box), part(X, [4, 0], box))
    with pytest.raises(pytest.fail.Exception):
        data.read(np.array([1]), (((0, 5),), ((3, 4),), ((0, 7),), ((0, 3),)))


def test_results_are_copies(path: Path) -> None:
    data = Hdf5Dataset(path, "train", cache=10**9)
    for _ in range(3):
        data.read(np.array([0]))[...] = 99
        data.read_targets(np.array([0]))[...] = 99
    np.testing.assert_array_equal(data.read(np.array([0])), X[:1])
    np.testing.assert_array_equal(data.read_targets(np.array([0])), Y[:1])


def test_split_group_or_root(path: Path, tmp_path) -> None:
    np.testing.assert_array_equal(Hdf5Dataset(path, "test").read(np.array([0])), X[-1:])
    write(tmp_path / "root.h5", [Split("", X, Y)])
    np.testing.assert_array_equal(Hdf5Dataset(tmp_path / "root.h5", "test").read(np.array([2])), X[2:3])


def test_bytes_are_scaled_and_normalised(tmp_path) -> None:
    raw = RNG.integers(0, 256, (4, 3, 3, 2), np.uint8)
    y = np.arange(4)
    write(tmp_path / "a.h5", [Split("train", raw, y)])
    np.testing.assert_allclose(
        Hdf5Dataset(tmp_path / "a.h5", dtype=np.float64).read(np.arange(4)), raw / 255, rtol=1e-15
    )
    write(tmp_path / "b.h5", [Split("train", raw, y, {"scale": 0.5, "mean": [1.0, 2.0], "std": [4.0, 8.0]})])
    data = Hdf5Dataset(tmp_path / "b.h5", dtype=np.float64)
    expected = (raw * 0.5 - [1, 2]) / [4, 8]
    np.testing.assert_allclose(data.read(np.arange(4)), expected, rtol=1e-15)
    np.testing.assert_allclose(
        data.read(np.array([1]), (((0, 3),), ((0, 3),), ((1, 2),))), expected[1:2, :, :, 1:], rtol=1e-15
    )


def test_real_targets_and_vectors(tmp_path) -> None:
    x, y = RNG.standard_normal((6, 4)), RNG.standard_normal((6, 2))
    write(tmp_path / "a.h5", [Split("train", x, y)])
    data = Hdf5Dataset(tmp_path / "a.h5", dtype=np.float64)
    assert check_targets(data) == -1
    assert (data.sample_shape, data.target_shape, data.classes) == ((4,), (2,), None)
    np.testing.assert_array_equal(data.read_targets(np.array([5, 0]), (((1, 2),),)), y[[5, 0], 1:])


def test_a_handle_is_never_used_after_a_fork(path: Path) -> None:
    data = Hdf5Dataset(path, "train")
    assert data._file is None, "opening must leave no handle behind"
    data.read(np.array([0]))
    ours = data._file
    data._pid = os.getpid() + 1  # as a forked child sees it
    np.testing.assert_array_equal(data.read(np.array([3])), X[3:4])
    assert data._file is not ours
    ours.close()


def test_classes_come_from_the_labels_where_nobody_says(tmp_path) -> None:
    y = Y[:, 0, 0, 0]
    write(tmp_path / "a.h5", [Split("train", X, y)])
    assert check_targets(Hdf5Dataset(tmp_path / "a.h5")) == y.max()
    assert f"labels one per sample, {y.max() + 1} classes" in describe(tmp_path / "a.h5")


@pytest.mark.parametrize(
    ("shape", "chunks", "told"),
    [
        ((2, 64, 64, 64, 1), (1, 64, 64, 64, 1), "as 1 x 8 x 64 x 64 x 1"),
        ((2, 64, 64, 64, 1), (1, 8, 64, 64, 1), ""),
        ((2, 64, 64, 64, 1), None, ""),
        ((2, 16, 16, 16, 1), (1, 16, 16, 16, 1), ""),
    ],
)
def test_chunks_that_all_processes_decompress_are_told(
    shape: tuple[int, ...], chunks: tuple[int, ...] | None, told: str, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("x", data=np.zeros(shape, np.uint8), chunks=chunks, compression="gzip" if chunks else None)
        f["y"] = np.zeros(len(f["x"]), np.uint8)
    text = describe(tmp_path / "a.h5")
    assert ("chunks hold whole samples" in text) == bool(told) and told in text


@pytest.mark.parametrize("kind", ["u1", "i2", "u4"])
def test_labels_keep_their_type(kind: str, tmp_path: Path) -> None:
    y = np.arange(2 * 3 * 3).reshape(2, 3, 3) % 5
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["x"], f["y"] = np.zeros((2, 3, 3, 1), "f4"), y.astype(kind)
    for cache in (0, 10**6):
        got = Hdf5Dataset(tmp_path / "a.h5", cache=cache).read_targets(np.array([1, 0]))
        assert got.dtype == np.dtype(kind)
        np.testing.assert_array_equal(got, y[[1, 0]])


def test_labels_with_gaps_are_listed(tmp_path: Path) -> None:
    y = np.arange(3 * 4 * 4).reshape(3, 4, 4).astype(np.uint8) % 3
    for first, more, said in (
        (255, {}, "4 values: 0, 1, 2, 255; 255 often stands for 'no class'"),
        (7, {}, "4 values: 0, 1, 2, 7\n"),
        (3, {}, "4 classes\n"),
        (3, {"classes": 9}, "4 values: 0, 1, 2, 3 (of 9 classes)\n"),
    ):
        y[0, 0, 0] = first
        with h5py.File(tmp_path / "gaps.h5", "w") as f:
            f["x"], f["y"] = np.zeros((3, 4, 4, 1), "f4"), y
            f["y"].attrs.update(more)
        assert f"labels one per voxel 4 x 4, {said}" in describe(tmp_path / "gaps.h5") + "\n"


@pytest.mark.parametrize("most", [2 * 5 * 6 * 7, 50])
def test_labels_are_scanned_in_pieces(tmp_path, monkeypatch, most: int) -> None:
    monkeypatch.setattr(targets, "SCAN", most)
    y = Y.copy()
    y[9, 4, 5, 6] = 4
    write(tmp_path / "a.h5", [Split("train", X, y)], classes=4)
    with pytest.raises(DataError, match=r"label 4 in sample 9 of '/train/y', expected 0 to 3 \(4 classes\)"):
        check_targets(Hdf5Dataset(tmp_path / "a.h5"))


def config(path: Path, **more: Any) -> DataConfig:
    return DataConfig(train=str(path), **more)


@pytest.mark.parametrize(
    ("expect", "words"),
    [
        ({"input_shape": (5, 6, 7, 1)}, r"shape \(5, 6, 7, 3\), expected \(5, 6, 7, 1\), the network's input"),
        ({"input_shape": (3, 5, 6, 7)}, "channels last"),
        ({"target_shape": ()}, r"targets have the shape \(5, 6, 7\) per sample, expected \(\)"),
        ({"classes": 3}, r"label 3 in sample \d+ of .*, expected 0 to 2 \(3 classes\)"),
    ],
)
def test_does_not_fit_the_network(path: Path, expect: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_dataset(config(path), **expect)


def test_fits_the_network(path: Path) -> None:
    data = open_dataset(config(path), input_shape=(5, 6, 7, 3), target_shape=(5, 6, 7), classes=4)
    assert data.read(np.array([1])).dtype == np.float32
    with pytest.raises(DataError, match="data.test: not given"):
        open_dataset(config(path), "test")


def raw_file(path: Path, **arrays: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, a in arrays.items():
            file[name] = a
    return path


LABELS = np.zeros(4, int)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"X_train": np.zeros((4, 2)), "y": LABELS}, "no dataset 'x'.*There are datasets X_train, y"),
        ({"x": np.zeros((4, 2)), "Y": LABELS}, "no dataset 'y'.*did you mean 'Y'"),
        ({"val/x": np.zeros((4, 2)), "val/y": LABELS}, "no dataset 'x' for the split 'train'.*groups val"),
        ({"x": np.zeros((4, 2), complex), "y": LABELS}, "has the type complex128, expected whole or real numbers"),
        ({"x": np.zeros(4), "y": LABELS}, r"has the shape \(4,\), expected \(samples"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(3, int)}, r"'y' has the shape \(3,\), expected one entry per sample"),
        ({"x": np.zeros((4, 2, 2, 1)), "y": np.zeros((4, 10), int)}, r"expected labels \(4,\), or one per voxel \(4, 2, 2\)"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "holds no samples"),
        ({"x": np.zeros((4, 2)), "y": np.array([b"cat"] * 4)}, "has the type .S3, expected whole or real numbers"),
        ({"x": np.zeros((4, 2)), "y": np.array([0, 1, -1, 0])}, "label -1 in sample 2"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(4)}, "targets are real numbers, expected whole-number labels"),
    ],
)  # fmt: skip
def test_wrong_contents(tmp_path, arrays: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as e:
        open_dataset(config(raw_file(tmp_path / "bad.h5", **arrays)), classes=10)
    assert "bad.h5" in str(e.value)


def test_wrong_files(tmp_path, path: Path) -> None:
    with pytest.raises(DataError, match="nope.h5: no such file"):
        open_dataset(config(tmp_path / "nope.h5"))
    (tmp_path / "text.h5").write_text("hello")
    with pytest.raises(DataError, match="text.h5: expected an HDF5 file, but it is not an HDF5 file"):
        open_dataset(config(tmp_path / "text.h5"))
    with pytest.raises(DataError, match="it is a directory"):
        open_dataset(config(tmp_path))
    (tmp_path / "cut.h5").write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match="cut.h5: expected an HDF5 file, but it is truncated"):
        open_dataset(config(tmp_path / "cut.h5"))


def test_wrong_attributes(tmp_path) -> None:
    for attributes, words in [
        ({"mean": [1.0, 2.0]}, "attribute 'mean' has 2 numbers, expected 1 or 3"),
        ({"std": 0.0}, "attribute 'std' is"),
        ({"scale": "big"}, "attribute 'scale' is 'big', expected numbers"),
        ({"scale": [1.0, 2.0]}, "attribute 'scale' has 2 numbers, expected 1"),
        ({"mean": np.nan}, "attribute 'mean' is nan, expected finite numbers"),
        ({"std": []}, "attribute 'std' has 0 numbers, expected 1 or 3"),
    ]:
        write(tmp_path / "a.h5", [Split("train", X, Y, attributes)], overwrite=True)
        with pytest.raises(DataError, match=words):
            Hdf5Dataset(tmp_path / "a.h5")


@pytest.mark.parametrize("said", [3, [3], np.array([[3]], np.int8), np.float64(3), 3.0])
@pytest.mark.parametrize("scale", [0.5, [0.5], np.array([[0.5]])])
def test_attributes_as_arrays_of_one(tmp_path, said: Any, scale: Any) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.ones((4, 2), np.int16), np.arange(4) % 3
        file["x"].attrs["scale"], file["y"].attrs["classes"] = scale, said
        file.attrs["mean"] = [1]
    data = Hdf5Dataset(tmp_path / "a.h5")
    assert data.classes == 3
    assert data.class_names == ()
    assert data.read(np.array([0])).tolist() == [[-0.5, -0.5]]


@pytest.mark.parametrize("kind", [list, np.bytes_, h5py.string_dtype()])
def test_names_of_classes(tmp_path, kind: Any) -> None:
    names = ["cat", "Käfer 蟲", "dog"]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.ones((4, 2)), np.array([0, 1, 2, 0])
        file["y"].attrs["classes"] = (
            names
            if kind is list
            else np.array([n.encode() for n in names])
            if kind is np.bytes_
            else np.array(names, kind)
        )
        file["bad"] = np.array([0, 1, 3, 0])
        file["bad"].attrs["classes"] = names
    assert Hdf5Dataset(tmp_path / "a.h5").class_names == tuple(names)
    assert "    samples per class cat 2 Käfer 蟲 1 dog 1" in describe(tmp_path / "a.h5")
    with pytest.raises(
        DataError, match=r"label 3 in sample 2 of '/bad', expected 0 to 2 \(3 classes: cat, Käfer 蟲, dog\)"
    ):
        describe(tmp_path / "a.h5", y="bad")


@pytest.mark.parametrize(
    "said", ["cat", ["cat", "cat"], [1, 2], [], 0, -1, 2.5, np.nan, [["a"], ["b"]], h5py.Empty("f"), 1j, "bird" * 99]
)
def test_other_classes_are_refused(tmp_path, said: Any) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.ones((4, 2)), np.arange(4)
        file["y"].attrs["classes"] = said
    with pytest.raises(
        DataError, match="attribute 'classes' is .*, expected how many there are, or a list of their names"
    ):
        Hdf5Dataset(tmp_path / "a.h5")


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", ">i2", "i4", "u4", "i8", "f2", "f4", ">f8", "?"])
def test_all_types_are_read_as_they_are(tmp_path, dtype: str) -> None:
    x = np.array([[0, 1], [100, 27]]).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = x, np.array([0, 1])
    expected = x / 255 if dtype == "u1" else x.astype(float)
    np.testing.assert_allclose(
        Hdf5Dataset(tmp_path / "a.h5", dtype=np.float64).read(np.arange(2)), expected, rtol=1e-15
    )


@pytest.mark.parametrize("name", ["a\0b", "a\ud800", "é" * 300, "a" * 5000, "x/" * 400])
def test_names_that_cannot_be(tmp_path, path: Path, name: str) -> None:
    for call in (
        lambda: Hdf5Dataset(tmp_path / name),
        lambda: describe(tmp_path / name),
        lambda: describe(path, x=name),
    ):
        with pytest.raises(DataError):
            call()


def test_wrong_indices_and_boxes(path: Path) -> None:
    data = Hdf5Dataset(path, "train")
    with pytest.raises(DataError, match="sample index 11, expected 0 to 10"):
        data.read(np.array([0, 11]))
    with pytest.raises(DataError, match="a box of 1 dimensions, expected 4"):
        data.read(np.array([0]), (((0, 1),),))
    with pytest.raises(DataError, match="in dimension 1, expected increasing runs inside 0..6"):
        data.read(np.array([0]), (((0, 1),), ((0, 7),), ((0, 1),), ((0, 1),)))
