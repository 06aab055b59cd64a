"""Turn other formats into HDF5: IDX (MNIST, Fashion-MNIST), NPZ, NPY pairs, folders of images."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lbpar.config.paths import as_path
from lbpar.data.idx import read_idx
from lbpar.data.moments import channel_moments
from lbpar.data.writer import Split, write
from lbpar.errors import DataError

Channels = Literal["auto", "last", "first", "none"]
_IDX = re.compile(r"(?P<split>.+?)[-.]images[-.]idx\d[-.]ubyte(?:\.gz)?$")
_SPLITS = {"train": "train", "t10k": "test", "test": "test"}
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


def convert(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    split: str = "",
    channels: Channels = "auto",
    classes: int | None = None,
    gzip: bool = False,
    normalise: bool = False,
    overwrite: bool = False,
) -> list[Split]:
    """Convert one dataset to an HDF5 file.

    Parameters
    ----------
    sources : sequence of path
        One of: a directory of IDX files (``train-images-idx3-ubyte.gz`` and the like); an images and a labels file,
        both IDX or both NPY; an NPZ file with ``x_train, y_train, x_test, y_test`` or ``x, y``; a directory with a
        directory of images per class, or with ``train`` and ``test`` that hold such directories (needs Pillow).
    out : str or Path
        The file to write; splits of other names that it has already are kept.
    split : str
        Group for formats without splits of their own; empty: the root, which serves as any split.
    channels : {"auto", "last", "first", "none"}
        Where arrays have their channel dimension; ``auto``: none in IDX and in arrays (samples, H, W), else last.
    classes : int, optional
        Number of classes; default: largest label plus one.
    gzip : bool
        Compress.
    normalise : bool
        Store mean and standard deviation per channel of the first split, so that reading normalises.
    overwrite : bool
        Replace splits that the file has.

    Returns
    -------
    list of Split
        What was written.

    Raises
    ------
    DataError
        A source is missing, truncated or of no known format; numbers of samples and labels differ; labels are
        negative; the file cannot be written.
    """
    paths = [as_path(s) for s in sources]
    for p in paths:
        if not p.exists():
            raise DataError(f"{p}: no such file or directory.")
    splits = [_ready(s, channels) for s in _read(paths, split)]
    tops = [int(s.y.max()) for s in splits if s.y.dtype.kind in "iu" and s.y.size]
    if tops and classes is None:
        classes = max(tops) + 1
    if tops and classes is not None and max(tops) >= classes:
        raise DataError(f"{paths[0]}: got the label {max(tops)}, expected 0 to {classes - 1} ({classes} classes).")
    if normalise:
        first = splits[0].x
        scale = 1 / 255 if first.dtype == np.uint8 else 1.0
        mean, std = channel_moments(first, scale, f"convert: split '{splits[0].name or '/'}'")
        splits = [Split(s.name, s.x, s.y, {"mean": mean, "std": std}) for s in splits]
    write(out, splits, classes=classes if tops else None, gzip=gzip, overwrite=overwrite)
    return splits


def _read(paths: list[Path], split: str) -> list[Split]:
    first = paths[0]
    if len(paths) == 2 and not any(p.is_dir() for p in paths):
        if all(p.suffix == ".npy" for p in paths):
            return [Split(split, _npy(first), _npy(paths[1]))]
        return [Split(split, read_idx(first)[..., None], read_idx(paths[1]))]
    if len(paths) != 1:
        raise DataError(f"convert: got {len(paths)} sources, expected one, or an images and a labels file.")
    if first.is_dir():
        found = _idx_directory(first) or _image_directory(first, split)
        if found:
            return found
        raise DataError(
            f"{first}: expected IDX files (train-images-idx3-ubyte[.gz], ...) or a directory of images per class."
        )
    if first.suffix == ".npz":
        return _npz(first, split)
    raise DataError(f"{first}: unknown format; expected a directory, an .npz file, or two files (images and labels).")


def _idx_directory(folder: Path) -> list[Split]:
    splits: dict[str, Split] = {}
    for path in sorted(folder.iterdir()):
        match = _IDX.match(path.name)
        name = _SPLITS.get(match["split"]) if match else None
        if match is None or name is None or name in splits:
            continue
        stem = path.name[: match.end("split")]
        labels = [
            p
            for p in sorted(folder.iterdir())
            if p.name.startswith(f"{stem}-labels") or p.name.startswith(f"{stem}.labels")
        ]
        if not labels:
            raise DataError(f"{path}: there is no {stem}-labels file beside it.")
        splits[name] = Split(name, read_idx(path)[..., None], read_idx(labels[0]))
    return [splits[n] for n in ("train", "test") if n in splits]


def _npy(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise DataError(f"{path}: cannot be read as an NPY file: {e}.") from None


def _npz(path: Path, split: str) -> list[Split]:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name.lower(): file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
        raise DataError(f"{path}: cannot be read as an NPZ file: {e}.") from None
    splits = []
    for suffix, name in (("train", "train"), ("test", "test"), ("", split)):
        for x, y in (("x", "y"), ("images", "labels"), ("data", "target")):
            keys = [(f"{x}_{suffix}", f"{y}_{suffix}"), (f"{suffix}_{x}", f"{suffix}_{y}")] if suffix else [(x, y)]
            pair = next(((a, b) for a, b in keys if a in arrays and b in arrays), None)
            if pair:
                splits.append(Split(name, arrays[pair[0]], arrays[pair[1]]))
                break
    if not splits:
        raise DataError(
            f"{path}: got the arrays {', '.join(arrays)}, expected x and y, or x_train, y_train, x_test, y_test."
        )
    return splits


def _image_directory(folder: Path, split: str) -> list[Split]:
    inner = [folder / s for s in ("train", "test") if (folder / s).is_dir()]
    groups = [(f.name, f) for f in inner] or [(split, folder)]
    names: list[str] = []
    splits = []
    for name, group in groups:
        own = sorted(d.name for d in group.iterdir() if d.is_dir())
        names = names or own
        if own != names:
            raise DataError(
                f"{group}: got the classes {', '.join(own)}, expected those of {groups[0][1]}: {', '.join(names)}."
            )
        files = [
            (f, label)
            for label, c in enumerate(names)
            for f in sorted((group / c).iterdir())
            if f.suffix.lower() in _PICTURES
        ]
        if not files:
            return []
        splits.append(Split(name, _pictures([f for f, _ in files]), np.array([c for _, c in files], np.int64)))
    return splits


def _pictures(files: list[Path]) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError("convert: reading images needs Pillow; `pip install pillow`.") from None
    out: Any = None
    for i, f in enumerate(files):
        try:
            with Image.open(f) as image:
                one = np.asarray(image.convert("L" if image.mode in ("1", "L", "I;16", "I") else "RGB"))
        except (OSError, UnidentifiedImageError) as e:
            raise DataError(f"{f}: cannot be read as an image: {e}.") from None
        one = one[..., None] if one.ndim == 2 else one
        if out is None:
            out = np.empty((len(files), *one.shape), np.uint8)
        if one.shape != out.shape[1:]:
            raise DataError(
                f"{f}: got an image {one.shape}, expected {out.shape[1:]} as the first; make all the same size."
            )
        out[i] = one
    return out


def _ready(split: Split, channels: Channels) -> Split:
    """Bring one split to channels-last samples and int64 or real targets."""
    x, y = split.x, split.y
    where = f"convert: split '{split.name or '/'}'"
    if channels == "none" or (channels == "auto" and x.ndim == 3):
        x = x[..., None]
    elif channels == "first":
        x = np.moveaxis(x, 1, -1)
    if not 2 <= x.ndim <= 5:
        raise DataError(f"{where}: samples have the shape {x.shape}, expected (samples, [D], [H], [W], C).")
    if x.dtype.kind != "f" and x.dtype != np.uint8:
        raise DataError(f"{where}: samples have the type {x.dtype}, expected uint8 or floating point.")
    if x.dtype == np.float16 or x.dtype.itemsize > 8:
        x = x.astype(np.float32)
    if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind in "iub":
        y = y[:, 0]
    if y.dtype.kind in "iub":
        y = y.astype(np.int64)
        if y.size and y.min() < 0:
            raise DataError(f"{where}: got the label {y.min()}, expected 0 or more.")
    elif y.dtype.kind != "f":
        raise DataError(f"{where}: targets have the type {y.dtype}, expected whole or real numbers.")
    return Split(split.name, x, y, split.attributes)
