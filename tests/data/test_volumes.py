"""Volumes as samples: values, places and types as nibabel has them; sizes made alike; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lbpar.data.__main__ import main
from lbpar.data.convert import convert
from lbpar.data.formats.volumes import least_of, resample
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.uneven import UnevenFiles
from lbpar.data.volume_dataset import VolumeDataset
from lbpar.errors import DataError

nib = pytest.importorskip("nibabel")
pytest.importorskip("scipy")

RAS = np.array([[0.9, 0.1, 0, -20], [-0.1, 1.2, 0, 5], [0, 0, 2.5, 7], [0, 0, 0, 1]])
# Left, posterior, superior, in the order (superior, left, posterior).
SLP = RAS @ np.array([[0, -1, 0, 4], [0, 0, -1, 6], [1, 0, 0, 0], [0, 0, 0, 1.0]])


def save(path: Path, values: np.ndarray, affine: np.ndarray = RAS, slope: float = 1, inter: float = 0) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nib.Nifti1Image(values, affine, dtype=values.dtype)
    image.header.set_slope_inter(slope, inter)
    if (slope, inter) != (1, 0):  # nibabel would divide by it
        image = nib.Nifti1Image(values * slope + inter, affine)
        image.header.set_data_dtype(values.dtype)
        image.header.set_slope_inter(slope, inter)
    nib.save(image, path)
    return nib.load(path)


def draw(seed: int, shape: tuple[int, ...], dtype: Any, classes: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if classes:
        return rng.integers(0, classes, shape).astype(dtype)
    return rng.integers(-100 if np.dtype(dtype).kind != "u" else 0, 100, shape).astype(dtype)


def read(path: Path, name: str, split: str = "") -> np.ndarray:
    with h5py.File(path) as file:
        return file[f"{split}/{name}"][...]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "float32", "float64"])
@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
def test_values_types_and_places_are_nibabels(tmp_path: Path, dtype: str, suffix: str) -> None:
    for i, affine in enumerate((RAS, SLP)):
        shape = (5, 7, 3) if i == 0 else (3, 5, 7)
        save(tmp_path / f"d/images/case{i}.{suffix}", draw(i, shape, dtype), affine)
        save(tmp_path / f"d/labels/case{i}.{suffix}", draw(i, shape, "uint8", 3), affine)
    out = tmp_path / "o.h5"
    [split] = convert([tmp_path / "d"], out)
    assert split.classes == 3 and read(out, "x").dtype == dtype and read(out, "y").dtype == np.uint8
    for i in range(2):
        image, label = (
            nib.as_closest_canonical(nib.load(tmp_path / f"d/{kind}/case{i}.{suffix}")) for kind in ("images", "labels")
        )
        np.testing.assert_array_equal(read(out, "x")[i, ..., 0], np.asanyarray(image.dataobj))
        np.testing.assert_array_equal(read(out, "y")[i], np.asanyarray(label.dataobj))
        np.testing.assert_allclose(read(out, "affine")[i], image.affine, rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(read(out, "spacing")[i], image.header.get_zooms(), rtol=1e-5)
    # The same place in the world, whatever order the file has.
    np.testing.assert_allclose(*read(out, "affine"), rtol=1e-5, atol=1e-5)
    assert [Path(name.decode()).name for name in read(out, "files")] == [f"case{i}.{suffix}" for i in range(2)]


def test_scaled_numbers_and_channels(tmp_path: Path) -> None:
    image = save(tmp_path / "a.nii.gz", draw(0, (4, 3, 5, 2), "int16"), slope=0.5, inter=10)
    save(tmp_path / "a_seg.nii.gz", draw(1, (4, 3, 5), "int16", 4))
    assert np.asanyarray(image.dataobj).min() < 0 and image.get_data_dtype() == np.int16
    convert([tmp_path / "a.nii.gz", tmp_path / "a_seg.nii.gz"], tmp_path / "o.h5", normalise=True)
    np.testing.assert_array_equal(read(tmp_path / "o.h5", "x")[0], image.get_fdata().astype(np.float32))
    assert read(tmp_path / "o.h5", "y").dtype == np.int16
    x = Hdf5Dataset(tmp_path / "o.h5", dtype=np.float64).read(np.arange(1))
    np.testing.assert_allclose(x.mean(axis=(0, 1, 2, 3)), 0, atol=1e-12)
    np.testing.assert_allclose(x.std(axis=(0, 1, 2, 3)), 1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "int16", "uint8"])
def test_numpy_volumes_in_splits(tmp_path: Path, dtype: str) -> None:
    for split, n in (("train", 2), ("test", 1)):
        for i in range(n):
            for kind, values in (("images", draw(i, (3, 5, 4), dtype)), ("masks", draw(i, (3, 5, 4), "int8", 2))):
                (tmp_path / "d" / split / kind).mkdir(parents=True, exist_ok=True)
                np.save(tmp_path / "d" / split / kind / f"{i}.npy", values)
    convert([tmp_path / "d"], tmp_path / "o.h5")
    x, y = (read(tmp_path / "o.h5", name, "train") for name in "xy")
    assert (x.dtype, x.shape, y.dtype) == (dtype, (2, 3, 5, 4, 1), np.int8)
    np.testing.assert_array_equal(x[1, ..., 0], draw(1, (3, 5, 4), dtype))
    np.testing.assert_array_equal(y[1], draw(1, (3, 5, 4), "int8", 2))
    with h5py.File(tmp_path / "o.h5") as file:
        assert "affine" not in file["train"]


def test_sizes_are_padded_or_refused_by_name(tmp_path: Path) -> None:
    shapes = [(5, 4, 3), (3, 6, 3)]
    for i, shape in enumerate(shapes):
        save(tmp_path / f"d/images/{i}.nii", draw(i, shape, "int16"))
        save(tmp_path / f"d/masks/{i}_mask.nii", draw(i, shape, "uint8", 2))
    with pytest.raises(DataError, match=r"1.nii: got 3 x 6 x 3 voxels, expected 5 x 4 x 3 as 0.nii; `--pad`"):
        convert([tmp_path / "d"], tmp_path / "o.h5")
    assert not (tmp_path / "o.h5").exists()
    assert main(["convert", str(tmp_path / "d"), "--out", str(tmp_path / "o.h5"), "--pad", "4"]) == 0
    x, y = read(tmp_path / "o.h5", "x"), read(tmp_path / "o.h5", "y")
    assert x.shape == (2, 8, 8, 4, 1)
    np.testing.assert_array_equal(read(tmp_path / "o.h5", "size"), shapes)
    for i, shape in enumerate(shapes):
        inside, own = tuple(slice(n) for n in shape), draw(i, shape, "int16")
        np.testing.assert_array_equal(x[i][inside][..., 0], own)
        np.testing.assert_array_equal(y[i][inside], draw(i, shape, "uint8", 2))
        outside = np.ones(x.shape[1:4], bool)
        outside[inside] = False
        assert (x[i][outside] == own.min()).all() and (y[i][outside] == 0).all()


def test_volumes_of_all_splits_come_to_one_size_and_type(tmp_path: Path) -> None:
    """The largest volume may lie in any split, and a single file may be scaled by its header."""
    shapes = {"train": [(5, 4, 3), (3, 6, 3)], "test": [(3, 3, 7)]}
    for split, some in shapes.items():
        for i, shape in enumerate(some):
            slope = {"slope": 0.5, "inter": 10} if split == "test" else {}
            save(tmp_path / f"d/{split}/images/{i}.nii", draw(i, shape, "int16"), **slope)
            save(tmp_path / f"d/{split}/labels/{i}.nii", draw(i, shape, "uint8" if i else "int16", 2))
    convert([tmp_path / "d"], tmp_path / "o.h5", pad=2)
    for split, some in shapes.items():
        x = read(tmp_path / "o.h5", "x", split)
        assert (x.shape, x.dtype) == ((len(some), 6, 6, 8, 1), np.float32)
        for i, shape in enumerate(some):
            image = nib.as_closest_canonical(nib.load(tmp_path / f"d/{split}/images/{i}.nii"))
            np.testing.assert_array_equal(x[i][tuple(map(slice, shape))][..., 0], image.get_fdata())
    convert([tmp_path / "d"], tmp_path / "files", each=True)
    # Files of their own sizes that are trained on as one data set must be of one type.
    files = UnevenFiles((f"{tmp_path}/files/train/*.h5", f"{tmp_path}/files/test/*.h5")).files
    assert [(f.stored_type(False), f.stored_type(True)) for f in files] == [(np.float32, np.int16)] * 3


def test_files_that_are_named_one_by_one(tmp_path: Path) -> None:
    """By patterns or in any order; the names must go together."""
    cases = ("sub-10", "sub-11", "sub-2[x]")
    for i, case in enumerate(cases):
        save(tmp_path / case / "anat/t1.nii.gz", draw(i, (4, 3, 5), "int16"))
        save(tmp_path / case / "anat/seg.nii", draw(i, (4, 3, 5), "uint8", 3))
    convert([tmp_path / "*/anat/t1.nii.gz"], tmp_path / "a.h5", labels=[tmp_path / "*/anat/seg.nii"])
    order = [cases[i] for i in (2, 0, 1)]
    images, maps = ([tmp_path / c / "anat" / name for c in order] for name in ("t1.nii.gz", "seg.nii"))
    convert(images, tmp_path / "b.h5", labels=maps)
    for name in ("x", "y", "affine"):
        a, b = read(tmp_path / "a.h5", name), read(tmp_path / "b.h5", name)
        np.testing.assert_array_equal(b, a[[2, 0, 1]])
    np.testing.assert_array_equal(read(tmp_path / "b.h5", "y")[1], nib.as_closest_canonical(nib.load(maps[1])).dataobj)
    assert [f.decode() for f in read(tmp_path / "b.h5", "files")] == [str(f) for f in images]
    [split] = convert(images[:1], tmp_path / "one.h5", labels=maps[:1])
    assert len(split.x) == 1
    with pytest.raises(DataError, match="two of them would be .*t1.h5"):
        convert(images, tmp_path / "each", labels=maps, each=True)


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (["a_t1.nii", "b_t1.nii"], ["b_seg.nii", "a_seg.nii"], "a_t1.nii with the labels .*b_seg.nii, expected names that go together"),
        (["a_t1.nii", "b_t1.nii"], ["a_seg.nii"], "got 2 images and 1 labels"),
        (["a_t1.nii", "b_t1.nii", "a_seg.nii"], [], "got 3 sources, .* named after `--labels`"),
        (["?_t1.nii"], ["?_mask.nii"], "--labels: no file is called .*_mask.nii"),
        (["a_t1.nii", "a_t1.nii"], ["a_seg.nii", "b_seg.nii"], "a_t1.nii comes twice"),
        (["a_t1.nii", "notes.txt"], ["a_seg.nii", "b_seg.nii"], "notes.txt: expected a volume"),
    ],
)  # fmt: skip
def test_names_that_do_not_go_together_are_refused(
    tmp_path: Path, images: list[str], labels: list[str], words: str
) -> None:
    for case in "ab":
        save(tmp_path / f"{case}_t1.nii", draw(1, (4, 3, 5), "int16"))
        save(tmp_path / f"{case}_seg.nii", draw(1, (4, 3, 5), "uint8", 3))
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(DataError, match=words):
        convert([tmp_path / f for f in images], tmp_path / "o.h5", labels=[tmp_path / f for f in labels])
    assert not (tmp_path / "o.h5").exists()


def test_padding_is_the_least_finite_value(tmp_path: Path) -> None:
    values = np.full((3, 2, 2), 7, np.float32)
    values[0, 0], values[1, 1, 0] = np.nan, -np.inf
    for i, image in enumerate((values, np.ones((2, 4, 2), np.float32))):
        save(tmp_path / f"d/images/{i}.nii", image)
        save(tmp_path / f"d/labels/{i}.nii", np.zeros(image.shape, np.uint8))
    convert([tmp_path / "d"], tmp_path / "o.h5", pad=1)
    assert (read(tmp_path / "o.h5", "x")[0, :, 2:] == 7).all()
    padded = VolumeDataset(tmp_path / "d" / "images", (3, 4, 2), "float32")
    assert least_of(iter([values[:1, :1], values[2:]])) == 7 and padded._least_of(0) == 7


def test_resampling_keeps_places(tmp_path: Path) -> None:
    place = np.stack(np.meshgrid(*map(np.arange, (6, 8, 10)), indexing="ij"), axis=-1)
    world = place @ RAS[:3, :3].T + RAS[:3, 3]
    save(tmp_path / "a.nii", world.astype(np.float32))  # every voxel holds where it is
    labels = draw(0, (6, 8, 10), "uint8", 5)
    save(tmp_path / "b.nii", labels)
    out = tmp_path / "o.h5"
    convert([tmp_path / "a.nii", tmp_path / "b.nii"], out, shape=(4, 16, 5))
    x, y, affine = read(out, "x")[0], read(out, "y")[0], read(out, "affine")[0]
    inside = (slice(None), slice(1, -1), slice(None))  # beyond the last centres, values are those of the edge
    new = np.stack(np.meshgrid(*map(np.arange, x.shape[:3]), indexing="ij"), axis=-1) @ affine[:3, :3].T + affine[:3, 3]
    np.testing.assert_allclose(x[inside], new[inside], atol=1e-4)
    at = [
        np.clip(np.rint((np.arange(m) + 0.5) * n / m - 0.5 - 1e-9), 0, n - 1).astype(int) for n, m in ((6, 4), (8, 16))
    ]
    np.testing.assert_array_equal(y[:, :, 0] < 5, True)
    np.testing.assert_array_equal(resample(labels[..., None], np.array([1.5, 0.5, 1]), (4, 16, 10), True)[..., 0],
                                  labels[np.ix_(*at, np.arange(10))])  # fmt: skip
    convert([tmp_path / "a.nii", tmp_path / "b.nii"], out, spacing=[1.0], overwrite=True)
    sides = np.sqrt((RAS[:3, :3] ** 2).sum(axis=0))
    assert read(out, "x").shape[1:4] == tuple(np.rint(np.array([6, 8, 10]) * sides).astype(int))
    np.testing.assert_allclose(read(out, "spacing")[0], 1)


def test_whole_numbers_are_rounded_when_resampled() -> None:
    values = np.array([0, 10, 21, 30], np.int16).reshape(1, 1, 4, 1)
    got = resample(values, np.array([1, 1, 0.5]), (1, 1, 8))
    assert got.dtype == np.int16
    np.testing.assert_array_equal(got.ravel(), [0, 2, 8, 13, 18, 23, 28, 30])


@pytest.mark.parametrize(
    ("image", "label", "message"),
    [
        (
            {},
            {"values": draw(0, (4, 5, 5), "uint8", 2)},
            "got 4 x 5 x 5 x 1 values, expected 4 x 5 x 6 x 1: one label for",
        ),
        ({}, {"affine": RAS + np.eye(4)[:, [1, 2, 3, 0]] * [0, 0, 0, 1]}, "they do not lie in the same place"),
        ({}, {"values": np.full((4, 5, 6), 0.5, np.float32)}, "got the label 0.5, expected whole numbers"),
        ({"values": np.ones((4, 5), np.int16)}, {}, r"got values of shape \(4, 5\), expected a volume"),
        ({"values": np.ones((4, 5, 6), np.complex64)}, {}, "it holds values of type complex64"),
        ({"damaged": True}, {}, "cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, image: Any, label: Any, message: str) -> None:
    for name, given, values in (
        ("a.nii.gz", image, draw(0, (4, 5, 6), "int16")),
        ("b.nii.gz", label, draw(0, (4, 5, 6), "uint8", 2)),
    ):
        save(tmp_path / name, given.get("values", values), given.get("affine", RAS))
    if image.get("damaged"):
        whole = (tmp_path / "a.nii.gz").read_bytes()
        (tmp_path / "a.nii.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=message):
        convert([tmp_path / "a.nii.gz", tmp_path / "b.nii.gz"], tmp_path / "o.h5")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.nii.gz", "b.nii.gz"]


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((2, 3, 3)), y=np.arange(2))
    np.save(tmp_path / "a.npy", np.ones((2, 3, 3)))
    for kind in ("images", "masks"):
        (tmp_path / "d" / kind).mkdir(parents=True)
        np.save(tmp_path / "d" / kind / "0.npy", np.ones((2, 3, 3), np.int8))
    for name in "ab":
        (tmp_path / "classes" / name).mkdir(parents=True)
        np.save(tmp_path / "classes" / name / "0.npy", np.ones((2, 3, 3), np.int8))
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"], file["y"] = np.ones((2, 3, 3, 1)), np.arange(2)
    for folder in ("cifar", "idx"):
        (tmp_path / folder).mkdir()
    for name in ("train", "test"):
        (tmp_path / "cifar" / f"{name}.bin").write_bytes(bytes(3074))
    for name, data in (
        ("images-idx3", [8, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 5]),
        ("labels-idx1", [8, 1, 0, 0, 0, 1, 0]),
    ):
        (tmp_path / "idx" / f"train-{name}-ubyte").write_bytes(bytes([0, 0, *data]))
    for source, options, message in (
        ("a.npz", {"pad": 1}, "are for folders of volumes"),
        ("d", {"spacing": [1.0], "shape": (1, 1, 1)}, "expected one of them"),
        ("d", {"spacing": [1.0, -1.0, 1.0]}, "expected 1 or 3 numbers above 0"),
        ("d", {"spacing": [1.0]}, "does not say the size of its voxels"),
        ("d", {"shape": (1, 0, 1)}, "expected 3 whole numbers above 0"),
        ("d", {"pad": 0}, "1 or more"),
        ("d", {"channels": "first"}, "--channels is for arrays"),
        ("b.h5", {"spacing": [1.0]}, "are for folders of volumes"),
        ("b.h5", {"each": True}, "are for folders of volumes"),
        ("b.h5", {"channels": "first"}, "--channels is for arrays"),
        ("cifar", {"each": True}, "are for folders of volumes"),
        ("cifar", {"shape": (1, 1, 1)}, "are for folders of volumes"),
        ("idx", {"pad": 1}, "are for folders of volumes"),
        ("classes", {"each": True}, "--each is for folders `images` and `labels`"),
    ):
        with pytest.raises(DataError, match=message):
            convert([tmp_path / source], tmp_path / "o.h5", **options)  # type: ignore[arg-type]


def test_a_file_for_each_volume_in_its_own_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, sizes = np.random.default_rng(1), {"train": [(5, 4, 6), (3, 7, 4)], "test": [(6, 6, 6)]}
    kept: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for split, some in sizes.items():
        for i, size in enumerate(some):
            values = rng.integers(-500, 900, size).astype(np.int16), rng.integers(0, 2 + i, size).astype(np.uint8)
            kept[f"{split}/case{i}.h5"] = values
            for kind, array in zip(("images", "labels"), values, strict=True):
                (tmp_path / "in" / split / kind).mkdir(parents=True, exist_ok=True)
                nib.save(
                    nib.Nifti1Image(array, np.diag([1, 2, 3, 1.0])), tmp_path / "in" / split / kind / f"case{i}.nii.gz"
                )
    args = ["convert", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--each"]
    assert main([*args, "--chunk", "2"]) == 0
    assert f"-> {tmp_path}/out/test/case0.h5" in capsys.readouterr().out
    assert {str(f.relative_to(tmp_path / "out")) for f in (tmp_path / "out").rglob("*.h5")} == set(kept)
    for name, (x, y) in kept.items():
        with h5py.File(tmp_path / "out" / name) as f:
            np.testing.assert_array_equal(f["x"][0, ..., 0], x)
            np.testing.assert_array_equal(f["y"][0], y)
            assert f["x"].dtype == np.int16 and f["x"].chunks[1] == 2 and f["y"].attrs["classes"] == 3
            np.testing.assert_allclose(f["affine"][0], np.diag([1, 2, 3, 1.0]))
    data = UnevenFiles((f"{tmp_path}/out/train/*.h5",), "train")
    assert [data.extents(n) for n in range(2)] == sizes["train"]
    assert main(args) == 2 and "--overwrite" in capsys.readouterr().err
    assert main([*args, "--overwrite", "--spacing", "2"]) == 0
    with h5py.File(tmp_path / "out/test/case0.h5") as f:
        assert f["x"].shape == (1, 3, 6, 9, 1)
    capsys.readouterr()
    assert main([*args, "--overwrite", "--normalise"]) == 2
    assert "goes without --normalise" in capsys.readouterr().err


def test_raw_files_say_what_they_are_by_their_names(tmp_path: Path) -> None:
    """Width first and fastest, lowest byte first; labels of another type belong to them all the same."""
    for split, seed in (("train", 0), ("test", 5)):
        for i in range(2):
            values, labels = draw(seed + i, (5, 6, 7), np.uint16) * 300, draw(seed + i, (5, 6, 7), np.uint8, 3)
            for kind, array in (("images", values.astype("<u2")), ("labels", labels)):
                folder = tmp_path / "d" / split / kind
                folder.mkdir(parents=True, exist_ok=True)
                name = np.dtype(array.dtype.newbyteorder("=")).name
                (folder / f"c{i}_7x6x5_{name}.raw").write_bytes(array.tobytes())
    convert([tmp_path / "d"], tmp_path / "d.h5")
    for split, seed in (("train", 0), ("test", 5)):
        want = np.stack([draw(seed + i, (5, 6, 7), np.uint16) * 300 for i in range(2)])[..., None]
        found = read(tmp_path / "d.h5", "x", split)
        assert found.dtype == np.uint16
        np.testing.assert_array_equal(found, want)
        labels = np.stack([draw(seed + i, (5, 6, 7), np.uint8, 3) for i in range(2)])
        np.testing.assert_array_equal(read(tmp_path / "d.h5", "y", split), labels)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("c.raw", 210, r"the name of a file of raw numbers says its size and type"),
        ("c_7x6x5_uint16.raw", 210, r"it has 210 bytes, expected 420, as its name says"),
        ("c_7x6x0_uint16.raw", 0, r"it has 0 bytes, expected 0"),
        ("c_7x6x5_complex64.raw", 1680, r"the name of a file of raw numbers"),
    ],
)
def test_raw_files_that_cannot_be_are_refused(tmp_path: Path, name: str, size: int, words: str) -> None:
    for kind in ("images", "labels"):
        (tmp_path / "d" / kind).mkdir(parents=True)
        (tmp_path / "d" / kind / name).write_bytes(bytes(size))
    with pytest.raises(DataError, match=words):
        convert([tmp_path / "d"], tmp_path / "d.h5")
    assert not (tmp_path / "d.h5").exists()
