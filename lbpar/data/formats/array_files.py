"""Files of arrays as splits: NPZ, pairs of NPY or IDX files, folders of IDX files."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Container
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.data.formats.folders import SPLITS
from lbpar.data.formats.idx import read_idx
from lbpar.data.writer import Split
from lbpar.errors import DataError

_PAIRS = (("x", "y"), ("images", "labels"), ("data", "target"), ("data", "targets"), ("data", "labels"))
_IDX = re.compile(rf"(?:.*[-_.])?(?P<split>t10k|{'|'.join(SPLITS)})(?=[-.]images[-.]idx\d[-.]ubyte(\.gz)?$)")


def read_pair(x: Path, y: Path, split: str) -> list[Split]:
    """Samples and targets in two files, both NPY or both IDX."""
    read = _npy if x.suffix == y.suffix == ".npy" else read_idx
    return [Split(split, read(x), read(y), origin=f"{x} and {y}")]


def read_idx_folder(folder: Path) -> list[Split]:
    """IDX files named as those of MNIST; none if there are none."""
    files = sorted(f for f in folder.iterdir() if f.name[0] != ".")
    splits: dict[str, tuple[str, Split]] = {}
    for path in files:
        match = _IDX.match(path.name)
        if match is None:
            continue
        stem, name = match[0], SPLITS.get(match["split"], "test")
        if name in splits:
            if splits[name][0] == stem:  # the same, compressed
                continue
            raise DataError(
                f"{folder}: got {splits[name][0]} and {stem} for the split {name}, expected one; give the two files of one."
            )
        labels = [f for f in files if f.name.startswith((f"{stem}-labels", f"{stem}.labels"))]
        if not labels:
            raise DataError(f"{path}: there is no {stem}-labels file beside it.")
        splits[name] = stem, Split(name, read_idx(path), read_idx(labels[0]), origin=f"{path} and {labels[0].name}")
    return [splits[n][1] for n in ("train", "val", "test") if n in splits]


def read_npz(path: Path, split: str) -> list[Split]:
    """Pairs of arrays named ``x_train, y_train`` or the like, or ``x, y``."""
    splits = []
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            names = {name.lower(): name for name in file.files}
            pairs = _pairs(names) or {split: [pair for pair in _PAIRS if {*pair} <= names.keys()]}
            for name, (pair, *more) in ((n, p) for n, p in pairs.items() if p):
                if more:
                    raise DataError(
                        f"{path}: got {pair[0]} and {more[0][0]}, which mean the same split; leave one out."
                    )
                x, y = (_member(path, file, names[n]) for n in pair)
                splits.append(Split(name, x, y, origin=f"{path}: {' and '.join(pair)}"))
    except DataError:
        raise
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as e:
        raise DataError(f"{path}: cannot be read as an NPZ file: {e}.") from None
    if not splits:
        raise DataError(
            f"{path}: got the arrays {', '.join(names.values()) or 'none'}, expected x and y, or x_train, y_train, x_test, y_test."
        )
    used = {n for found in pairs.values() for pair in found for n in pair}
    rest = ", ".join(name for lower, name in names.items() if lower not in used)
    splits[0].remarks.extend([f"left out: the arrays {rest}"] if rest else [])
    return splits


def _pairs(names: Container[str]) -> dict[str, list[tuple[str, str]]]:
    """Names of samples and targets per split, train first."""
    found: dict[str, list[tuple[str, str]]] = {}
    for word, split in SPLITS.items():
        for x, y in _PAIRS:
            for pair in ((f"{x}_{word}", f"{y}_{word}"), (f"{word}_{x}", f"{word}_{y}")):
                if pair[0] in names and pair[1] in names:
                    found.setdefault(split, []).append(pair)
    return found


def _member(path: Path, file: Any, name: str) -> Any:
    """One array, after a look whether the file holds as much as it declares."""
    info = file.zip.getinfo(f"{name}.npy")
    with file.zip.open(info) as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
        held, declared = info.file_size - member.tell(), prod(shape) * dtype.itemsize
    if held < declared and not dtype.hasobject:
        raise DataError(
            f"{path}: '{name}' declares {shape} {dtype}, {declared:,} bytes, but holds {held:,}; write it again."
        )
    return file[name]


def _npy(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise DataError(f"{path}: cannot be read as an NPY file: {e}.") from None
