"""Turn other formats into HDF5: IDX (MNIST, Fashion-MNIST), NPZ, NPY pairs, folders of pictures, volumes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from lbpar.config.paths import as_path
from lbpar.data.attributes import as_classes, find_attribute
from lbpar.data.checks import check_samples, is_label
from lbpar.data.formats.array_files import read_idx_folder, read_npz, read_pair
from lbpar.data.formats.cifar import read_cifar_folder
from lbpar.data.formats.folders import read_files, read_folder
from lbpar.data.formats.hdf5_files import read_hdf5
from lbpar.data.formats.pictures import SUFFIXES
from lbpar.data.formats.volume_file import is_volume, stem
from lbpar.data.formats.volumes import Fit, open_volumes
from lbpar.data.many_files import found_files
from lbpar.data.moments import channel_moments
from lbpar.data.new_file import destination
from lbpar.data.pieces import Rows, pieces
from lbpar.data.writer import Further, Split, write
from lbpar.errors import DataError

Channels = Literal["auto", "last", "first", "none"]


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
    spacing: Sequence[float] | None = None,
    shape: Sequence[int] | None = None,
    pad: int | None = None,
    dtype: str | None = None,
    test_share: float | None = None,
    x: str | Sequence[str] = "x",
    y: str | Sequence[str] = "y",
    chunk: Sequence[int] | None = None,
    each: bool = False,
    labels: Sequence[str | Path] = (),
) -> list[Split]:
    """Convert one dataset to an HDF5 file, in the number type of the source.

    Parameters
    ----------
    sources : sequence of path
        One of: a directory of IDX files (``train-images-idx3-ubyte.gz`` and the like); an images and a labels file,
        both IDX or both NPY; an NPZ file with ``x_train, y_train, x_test, y_test`` or ``x, y``; a directory with a
        directory of pictures per class, or with ``images`` and ``masks``, or with ``train``, ``val`` and ``test`` that hold
        such directories (needs Pillow); the same with volumes, NIfTI (needs nibabel), NPY or raw; a volume and its label map; any number
        of volumes or pictures, with ``labels``; a directory of CIFAR-10's or CIFAR-100's binary files; an HDF5 file. Patterns as
        ``cases/*_t1.nii.gz`` name files in the order of their names.
    out : str or Path
        The file to write; splits of other names that it has already are kept.
    split : str
        Group for formats without splits of their own; empty: the root, which serves as any split.
    channels : {"auto", "last", "first", "none"}
        Where arrays have their channel dimension; ``auto``: none in arrays (samples, H, W); last or wherever the labels
        tell in others, if there is no doubt.
    classes : int, optional
        Number of classes; default: largest label plus one, or the number of folders.
    gzip : bool
        Compress.
    normalise : bool
        Store mean and standard deviation per channel of the first split, so that reading normalises.
    overwrite : bool
        Replace splits that the file has.
    spacing, shape, pad
        How volumes come to one size; see `lbpar.data.formats.volumes.Fit`.
    dtype, test_share, x, y
        Of HDF5 files; see `lbpar.data.formats.hdf5_files.read_hdf5`. Several names are several inputs and targets.
    chunk : sequence of int, optional
        Compress in chunks of this part of a sample.
    each : bool
        Of volumes and label maps: ``out`` is a folder, in which each volume gets a file of its own, of its own size.
    labels : sequence of path
        The label maps, or masks, of volumes or pictures that are named one by one, in the same order.

    Returns
    -------
    list of Split
        What was written, and from what.

    Raises
    ------
    DataError
        A source is missing, damaged, of no known format or doubtful; samples and labels do not fit each other or what the
        file has; the file cannot be written.
    """
    paths, masks = (_named(some, what) for some, what in ((sources, "convert"), (labels, "--labels")))
    for p in [*paths, *masks]:
        if not os.path.exists(p):
            raise DataError(f"{p}: no such file or directory.")
    if classes is not None and not 1 <= classes < 1 << 31:
        raise DataError(f"convert: got {classes} classes, expected 1 or more, fewer than 2³¹.")
    if chunk is not None and not (chunk and all(0 < n < 1 << 31 for n in chunk)):
        raise DataError(
            f"convert: got the chunk {list(chunk)}, expected whole numbers above 0, one for each dimension of a sample."
        )
    xs, ys = ([n] if isinstance(n, str) else list(n) for n in (x, y))
    fit = Fit(spacing, shape, pad, each=each)
    if paths[0].suffix.lower() in (".h5", ".hdf5"):
        _refuse_fit(paths[0], fit)
        if len(paths) > 1 or masks or (os.path.exists(out) and os.path.samefile(paths[0], out)):
            raise DataError(f"{paths[0]}: expected one HDF5 file, without --labels, and another name for the new one.")
        found = read_hdf5(paths[0], split, xs, ys, dtype, test_share)
    elif dtype is not None or test_share is not None or (xs, ys) != (["x"], ["y"]):
        raise DataError(f"{paths[0]}: --type, --test-share, --x and --y are for HDF5 files.")
    else:
        found = read_files(paths, masks, split, fit) if masks else _read(paths, split, fit)
    splits = _labelled([_ready(s, channels) for s in found], classes)
    most = max(len(values.shape) for s in splits for values in s.arrays().values()) - 1
    if chunk is not None and len(chunk) > most:
        raise DataError(
            f"convert: got the chunk {list(chunk)}, expected {most} numbers at most, one for each dimension of a sample {tuple(splits[0].x.shape[1:])}."
        )
    if each:
        if normalise:
            raise DataError(
                "convert: --each is for folders of volumes, and goes without --normalise, which would be another in each file; "
                "`data: {normalise: zscore}` does it in training."
            )
        return _write_each(splits, as_path(out), gzip, overwrite, chunk)
    path, kept = destination(out, [s.name for s in splits], overwrite)
    present = _present(path, kept, splits[0].names)
    _check_alike([*present, *splits], path)
    attributes = present[0].attributes if present else _moments(splits[0]) if normalise else splits[0].attributes
    if normalise and "mean" not in attributes:
        raise DataError(
            f"{path}: /{present[0].name} has no mean and deviation, so a split beside it cannot have any; leave --normalise out, "
            "or convert all of them into a new file."
        )
    number = max(s.classes for s in [*present, *splits])
    for s in splits:
        if s.x.dtype.kind in "iu" and s.x.dtype != np.uint8 and not attributes:
            s.remarks.append(
                f"{s.x.dtype} is read as it is, not scaled to 0 ... 1; --normalise gives mean 0 and deviation 1"
            )
    further = [s.further for s in splits]
    if normalise:
        own = {n: _moments(splits[0], more) for n, more in splits[0].further.items() if more.is_input}
        further = [{n: replace(f, attributes=own.get(n, f.attributes)) for n, f in some.items()} for some in further]
    splits = [
        replace(s, attributes=attributes, classes=number, further=f) for s, f in zip(splits, further, strict=True)
    ]
    write(path, splits, gzip=gzip, overwrite=overwrite, chunk=chunk)
    return splits


def _write_each(
    splits: list[Split], out: Path, gzip: bool, overwrite: bool, chunk: Sequence[int] | None
) -> list[Split]:
    """A file for each split, named as what it comes from, in folders of their names."""
    number, made = max(s.classes for s in splits), []
    files = [out / s.name / f"{stem(Path(s.beside['files'][0].decode()))}.h5" for s in splits]
    twice = next((f for i, f in enumerate(files) if f in files[:i]), None)
    if twice is not None:
        raise DataError(
            f"convert: --each names files as their volumes are, and two of them would be {twice}; convert these separately."
        )
    for path in files:
        destination(path, [""], overwrite)  # refused before one is written
    for path, s in zip(files, splits, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        made.append(replace(s, name="", classes=number))
        write(path, made[-1:], gzip=gzip, overwrite=overwrite, chunk=chunk)
    return [replace(s, name=str(path)) for s, path in zip(made, files, strict=True)]


def _named(names: Sequence[str | Path], where: str) -> list[Path]:
    """The files that paths and patterns name."""
    return [Path(f) for f in found_files([str(as_path(n)) for n in names], where)[0]] if names else []


def _read(paths: list[Path], split: str, fit: Fit) -> list[Split]:
    first = paths[0]
    if len(paths) == 2 and all(is_volume(p) and p.suffix != ".npy" for p in paths):
        x, y, words, beside = open_volumes(paths[:1], paths[1:], fit)
        origin = f"{first} and {paths[1]}: {words}, and a class per voxel"
        return [Split(split, x, y, origin=origin, beside=beside)]
    if not (len(paths) == 1 and first.is_dir()):
        _refuse_fit(first, fit)
    if len(paths) == 2 and not any(p.is_dir() for p in paths):
        return read_pair(first, paths[1], split)
    if len(paths) != 1:
        raise DataError(
            f"convert: got {len(paths)} sources, expected one, or an images and a labels file; label maps of several volumes or pictures are "
            "named after `--labels`."
        )
    if first.is_dir():
        found = read_idx_folder(first) or read_cifar_folder(first)
        if found:
            _refuse_fit(first, fit)
            return found
        found = read_folder(first, split, fit)
        if found:
            return found
        raise DataError(
            f"{first}: expected IDX files (train-images-idx3-ubyte[.gz], ...), CIFAR's binary files (data_batch_1.bin, ...), or "
            "a directory per class, or directories `images` and `masks`, of volumes (.nii[.gz], .npy, .raw) or pictures "
            f"({', '.join(s[1:] for s in SUFFIXES)})."
        )
    if first.suffix.lower() == ".npz":
        return read_npz(first, split)
    raise DataError(f"{first}: unknown format; expected a directory, an .npz file, or two files (images and labels).")


def _refuse_fit(path: Path, fit: Fit) -> None:
    if fit:
        raise DataError(
            f"{path}: --spacing, --shape, --pad and --each are for folders of volumes, and pairs of NIfTI files."
        )


def _ready(split: Split, channels: Channels) -> Split:
    """Bring one split to channels-last samples, and to labels or real targets."""
    x, y = split.x, split.y
    if isinstance(x, np.ndarray):
        place = _channel_place(x, y, split.origin) if channels == "auto" else channels
        x = x[..., None] if place == "none" else np.moveaxis(x, 1, -1) if place == "first" and x.ndim > 1 else x
        if x.dtype == bool:
            x = x.astype(np.int8)
        if x.dtype.kind == "f" and x.dtype.itemsize > 8:
            x = x.astype(np.float64)
        if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind in "iub":
            y = y[:, 0]
        if y.dtype == bool:
            y = y.astype(np.uint8)
        split = replace(split, x=x, y=y, origin=f"{split.origin}: {split.x.shape} {split.x.dtype}, channels {place}")
    elif channels not in ("auto", "last"):
        raise DataError(
            f"{split.origin}: --channels is for arrays (.npz, .npy pairs, IDX files); leave it out, these samples have theirs last."
        )
    check_samples(split.x, split.y, split.origin)
    return split


def _channel_place(x: Any, y: Any, where: str) -> str:
    """Where an array has its channels, if that is beyond doubt."""
    if x.ndim < 4:
        return "none" if x.ndim == 3 else "last"
    if is_label(y) and y.ndim > 2:
        spaces = {"last": x.shape[1:-1], "first": x.shape[2:], "none": x.shape[1:]}
        fitting = [place for place, space in spaces.items() if y.shape[1:] == space]
    else:
        ends = {"last": x.shape[-1], "first": x.shape[1]}
        usual, few = ([place for place, n in ends.items() if n in some] for some in ((1, 3), (2, 4)))
        fitting = ["last"] if (usual or few) == ["last"] else []
    if len(fitting) == 1:
        return fitting[0]
    first, last, space = x.shape[1], x.shape[-1], x.ndim - 2
    choices = [f"`--channels last` ({space}-D, {last} channels)", f"`--channels first` ({space}-D, {first} channels)"]
    if x.ndim == 4:
        choices.append("`--channels none` (volumes without channels)")
    raise DataError(f"{where}: got samples of shape {x.shape[1:]}; say where the channels are: {', '.join(choices)}.")


def _labelled(splits: list[Split], classes: int | None) -> list[Split]:
    """Count the classes; labels per voxel that are 0 and 255, as masks are usually drawn, become 0 and 1."""
    values = [_values(s) if is_label(s.y) else set() for s in splits]
    drawn = set().union(*(v for s, v in zip(splits, values, strict=True) if len(s.y.shape) > 1))
    if drawn == {255} or drawn == {0, 255}:
        splits = [replace(s, y=_halved(s.y), origin=f"{s.origin}, 255 taken for class 1") for s in splits]
        values = [{v // 255 for v in some} for some in values]
    elif 255 in drawn and 254 not in drawn and classes is None:
        raise DataError(
            f"convert: got the labels {', '.join(map(str, sorted(drawn)))}; 255 often stands for 'no class', which does not exist here. "
            "Give those voxels a class, or let 255 be one by --classes 256; `train: {loss: {name: ..., ignore_index: 255}}` then leaves them out."
        )
    done = []
    for s, some in zip(splits, values, strict=True):
        least = max(len(s.class_names), *(v + 1 for v in some), 0)
        if classes is not None and least > classes:
            raise DataError(f"{s.origin}: got the label {least - 1}, expected 0 to {classes - 1} ({classes} classes).")
        done.append(replace(s, classes=(classes or least) if some else 0))
    return done


def _values(split: Split) -> set[int]:
    """The labels that occur; of large ones, the smallest and largest of a piece only."""
    found: set[int] = set()
    for _, part in pieces(split.y):
        low, high = int(part.min()), int(part.max())
        if low < 0:
            raise DataError(f"{split.origin}: got the label {low}, expected 0 or more.")
        found.update(np.flatnonzero(np.bincount(part.ravel())).tolist() if high < 1 << 16 else (low, high))
    return found


def _halved(y: Any) -> Rows:
    return Rows(y.shape, np.uint8, lambda rows: (y[int(rows[0]) : int(rows[-1]) + 1] // 255).astype(np.uint8))


def _moments(split: Split, further: Further | None = None) -> dict[str, Any]:
    x = split.x if further is None else further.values
    scale = 1 / 255 if x.dtype == np.uint8 else 1.0
    mean, std = channel_moments(x, scale, split.origin)
    return {"mean": mean, "std": std}


def _present(path: Path, kept: list[str], names_of: tuple[str, str]) -> list[Split]:
    """The splits that a file has and keeps; their arrays have a shape and a type only."""
    import h5py

    found = []
    if kept:
        with h5py.File(path, "r", locking="best-effort") as file:
            for name in kept:
                x, y = (file[name].get(n) for n in names_of)
                if isinstance(x, h5py.Dataset) and isinstance(y, h5py.Dataset):
                    where = f"{path}:/{name}"
                    number, names = as_classes(find_attribute("classes", y, file[name]), where)
                    attributes = {n: find_attribute(n, x, file[name]) for n in ("scale", "mean", "std")}
                    x, y = (Rows(a.shape, a.dtype, _unread) for a in (x, y))
                    attributes = {n: a for n, a in attributes.items() if a is not None}
                    found.append(Split(name, x, y, attributes, number or 0, names, where))
    return found


def _unread(rows: NDArray[np.int64]) -> NoReturn:
    raise AssertionError


def _check_alike(splits: list[Split], path: Path) -> None:
    """Refuse splits of one file that would be read in different ways."""
    first = splits[0]
    for s in splits[1:]:
        kinds = [(a.x.shape[1:], a.x.dtype, a.y.shape[1:], is_label(a.y)) for a in (first, s)]
        if kinds[0] != kinds[1]:
            was, got = (f"{x} {dtype} and {'labels' if label else 'real targets'} {y}" for x, dtype, y, label in kinds)
            raise DataError(
                f"{path}: split '{s.name}' has samples {got}, expected {was} as '{first.name}'; splits of one file are alike. "
                "Give another --out."
            )
        if s.class_names != first.class_names:
            listed = (", ".join(a.class_names) or "no names" for a in (s, first))
            raise DataError("{}: split '{}' has the classes {}, expected {}.".format(path, s.name, *listed))
