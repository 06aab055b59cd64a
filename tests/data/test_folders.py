"""Folders of pictures: what becomes a class, a sample, a split, and what is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from lbpar.data.__main__ import main
from lbpar.data.convert import convert
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.errors import DataError

Image = pytest.importorskip("PIL.Image")


def fill(root: Path, *names: str, value: int | None = None) -> None:
    """Pictures whose pixels are a number each, or ``value``; other files where the name has no suffix of pictures."""
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".png", ".jpg", ".tif"):
            Image.fromarray(np.full((3, 4), i if value is None else value, np.uint8)).save(path)
        else:
            path.write_bytes(b"\0\5\x16\7 no picture")


def result(path: Path, split: str = "train") -> tuple[list[int], list[int], tuple[str, ...]]:
    data = Hdf5Dataset(path, split, dtype=np.float64)
    n = np.arange(len(data))
    return (
        (data.read(n)[:, 0, 0, 0] * 255).round().astype(int).tolist(),
        data.read_targets(n).tolist(),
        data.class_names,
    )


def test_what_systems_leave_behind_is_no_data(tmp_path, capsys) -> None:
    fill(tmp_path / "p", "cat/1.png", "dog/0.png", "dog/1.PNG.png", ".ipynb_checkpoints/1.png", "__MACOSX/1.png")
    fill(
        tmp_path / "p",
        "cat/._1.png",
        "cat/.DS_Store",
        "dog/Thumbs.db",
        ".DS_Store",
        "._x",
        "@eaDir/1.png",
        "desktop.ini",
    )
    fill(tmp_path / "p", "cat/notes.txt", "README")
    (tmp_path / "p" / ".hidden").mkdir()
    assert main(["convert", str(tmp_path / "p"), "--out", str(tmp_path / "o.h5")]) == 0
    assert result(tmp_path / "o.h5") == ([0, 1, 2], [0, 1, 1], ("cat", "dog"))
    out = capsys.readouterr().out.split("\n")
    assert out[0] == f"{tmp_path}/p: 3 pictures, L, a class per folder: 0 cat, 1 dog -> /"
    assert out[1] == f"  left out: 2 files that are no pictures ({tmp_path}/p/README, {tmp_path}/p/cat/notes.txt)"
    assert out[5] == "    samples per class cat 1 dog 2"


@pytest.mark.parametrize("name", ["val", "valid", "validation", "VAL"])
def test_validation_is_a_split(tmp_path, name: str) -> None:
    fill(tmp_path / "p", "Train/a/1.png", "Train/b/1.png", "test/b/1.png", f"{name}/a/1.png")
    (tmp_path / "p" / "test" / "a").mkdir()
    convert([tmp_path / "p"], tmp_path / "o.h5")
    assert result(tmp_path / "o.h5") == ([0, 1], [0, 1], ("a", "b"))
    assert result(tmp_path / "o.h5", "test") == ([2], [1], ("a", "b"))
    assert result(tmp_path / "o.h5", "val") == ([3], [0], ("a", "b"))


def test_numbered_and_foreign_names(tmp_path) -> None:
    fill(tmp_path / "n", *(f"{i}/1.png" for i in range(11)))
    convert([tmp_path / "n"], tmp_path / "n.h5")
    assert result(tmp_path / "n.h5")[0] == list(range(11)), "the folder 10 is class 10"
    # macOS takes letters apart: the same name in other bytes.
    fill(tmp_path / "u", "train/K\u00e4fer 蟲 🐞/ä ö.png", "train/zebra/2.png", "test/Ka\u0308fer 蟲 🐞/3.png")
    convert([tmp_path / "u"], tmp_path / "ü.h5")
    assert result(tmp_path / "ü.h5", "test") == ([2], [0], ("K\u00e4fer 蟲 🐞", "zebra"))


def test_pictures_with_masks(tmp_path, capsys) -> None:
    for split, n in (("train", 3), ("val", 2)):
        fill(tmp_path / "p" / split, *(f"images/{i}.png" for i in range(n)), "masks/.DS_Store")
        for i in range(n):
            fill(tmp_path / "p" / split, f"masks/{i}_mask.png", value=i)
    assert main(["convert", str(tmp_path / "p"), "--out", str(tmp_path / "o.h5")]) == 0
    train = Hdf5Dataset(tmp_path / "o.h5", "train")
    assert (train.sample_shape, train.target_shape, train.classes) == ((3, 4, 1), (3, 4), 3)
    assert train.read_targets(np.arange(3))[:, 2, 3].tolist() == [0, 1, 2]
    assert len(Hdf5Dataset(tmp_path / "o.h5", "val")) == 2
    assert "masks: 3 pictures, L, and a class per pixel -> /train" in capsys.readouterr().out


def test_masks_in_black_and_white(tmp_path) -> None:
    fill(tmp_path / "p", "imgs/a.png", "imgs/b.png")
    fill(tmp_path / "p", "labels/a.png", value=255)
    fill(tmp_path / "p", "labels/b.png", value=0)
    [split] = convert([tmp_path / "p"], tmp_path / "o.h5")
    assert split.origin.endswith("a class per pixel, 255 taken for class 1")
    data = Hdf5Dataset(tmp_path / "o.h5")
    assert data.classes == 2
    assert data.read_targets(np.arange(2))[:, 0, 0].tolist() == [1, 0]
    fill(tmp_path / "p", "labels/b.png", value=7)
    with pytest.raises(DataError, match="got the labels 7, 255; 255 often stands for 'no class'"):
        convert([tmp_path / "p"], tmp_path / "o.h5")
    convert([tmp_path / "p"], tmp_path / "o.h5", classes=256, overwrite=True)
    assert Hdf5Dataset(tmp_path / "o.h5").classes == 256


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["a/1.png", "b/"], "b: there are no pictures in this folder; fill it, or remove it"),
        (["a/1.png", "b/1.txt"], "b: there are no pictures in this folder"),
        (["a/1.png", "b/1.png", "c.png"], "pictures lie beside folders or without any .c.png, 1 in all"),
        (["train/a/1.png", "train/b/1.png", "test/1.png"], "test: pictures lie beside folders"),
        (["a/1.png", "b/deep/1.png"], "deep: a folder inside b"),
        (["data/a/1.png", "data/b/1.png"], "the class data alone.*If .*data is the dataset, name it"),
        (["train/a/1.png", "train/b/1.png", "extra/a/1.png"], "folders of splits .train. and others .extra."),
        (["test/1.png", "cat/1.png"], "folders of splits .test. and others .cat."),
        (["train/a/1.png", "training/a/1.png"], "mean the same split"),
        (["train/a/1.png", "train/b/1.png", "test/c/1.png"], "got the class c, expected those of the first split: a, b"),
        (["train/a/1.png", "train/b/1.png", "val/"], "val: there are no pictures"),
        (["images/1.png", "masks/2.png"], "'1' is in one of them only .2 such"),
        (["images/1.png", "masks/1.jpg"], "JPEG changes the values"),
        (["images/1.png", "images/1.tif", "masks/1.png"], "two pictures of one name"),
        (["images/1.png", "masks/1.png", "other/1.png"], "got the folders images, masks, other, expected"),
        (["images/train/1.png", "masks/train/1.png"], "a folder inside images"),
        (["a/1.png", "a/1_mask.png", "b/1.png"], "it looks like the mask of a picture beside it"),
        (["a/"], "expected IDX files"),
        (["1.png"], "expected IDX files"),
    ],
)  # fmt: skip
def test_doubtful_folders(tmp_path, files: list[str], words: str) -> None:
    for name in files:
        if name.endswith("/"):
            (tmp_path / "p" / name).mkdir(parents=True)
        else:
            fill(tmp_path / "p", name)
    with pytest.raises(DataError, match=words):
        convert([tmp_path / "p"], tmp_path / "o.h5")
    assert not list(tmp_path.glob("*o.h5*"))


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux")
def test_names_that_are_no_text(tmp_path, capsys) -> None:
    root = os.fsencode(tmp_path / "p")
    for name in (b"a\xff", b"b"):
        os.makedirs(os.path.join(root, name))
        Image.fromarray(np.zeros((2, 2), np.uint8)).save(os.fsdecode(os.path.join(root, name, b"1.png")))
    assert main(["convert", str(tmp_path / "p"), "--out", str(tmp_path / "o.h5")]) == 2
    assert "this name cannot be stored; rename the folder" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["uint8", "uint16", "int16", "float32"])
def test_stacks_of_planes_with_masks(kind: str, tmp_path: Path) -> None:
    """TIFF files of many pages are volumes, and so are their masks; types are kept."""
    tifffile = pytest.importorskip("tifffile")
    rng, made = np.random.default_rng(4), {}
    for i in range(2):
        x, y = rng.integers(0, 200, (5, 7, 6)).astype(kind), rng.integers(0, 3, (5, 7, 6)).astype(np.uint8)
        made[i] = x, y
        for folder, values in (("images", x), ("masks", y)):
            (tmp_path / "s" / folder).mkdir(parents=True, exist_ok=True)
            tifffile.imwrite(tmp_path / "s" / folder / f"{i}.tif", values, photometric="minisblack")
    assert main(["convert", str(tmp_path / "s"), "--out", str(tmp_path / "s.h5")]) == 0
    with h5py.File(tmp_path / "s.h5") as f:
        assert f["x"].dtype == kind and f["x"].shape == (2, 5, 7, 6, 1) and f["y"].dtype == np.uint8
        for i, (x, y) in made.items():
            np.testing.assert_array_equal(f["x"][i, ..., 0], x)
            np.testing.assert_array_equal(f["y"][i], y)
