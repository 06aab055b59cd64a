"""Write HDF5 datasets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.data.checks import check_samples, is_label
from lbpar.data.new_file import check_room, destination, new_file
from lbpar.data.pieces import pieces
from lbpar.hdf5_file import uninterrupted

_MOST_BYTES = 60_000  # an attribute holds 64 kB, all strings as long as the longest


@dataclass(frozen=True)
class Split:
    """What to store for one split: arrays, `Rows`, or anything with a shape, a dtype and slices (a memory map).

    Parameters
    ----------
    name : str
        ``train``, ``test``, or empty for the root of the file.
    x : array, (samples, [D], H, W, C)
        Whole or real numbers.
    y : array, (samples,), (samples, [D], H, W) or real targets
    attributes : dict
        Stored with x: scale, mean, std.
    classes : int
        Number of classes; 0 for real targets.
    class_names : tuple of str
        Where they are known.
    origin : str
        What was taken for this split, in words.
    remarks : list of str
        What else its maker should know: files that were left out, values that are not finite.
    beside : dict of array
        What else is known of each sample, stored beside x and y by these names: affine, spacing, files.
    """

    name: str
    x: Any
    y: Any
    attributes: dict[str, Any] = field(default_factory=dict)
    classes: int = 0
    class_names: tuple[str, ...] = ()
    origin: str = ""
    remarks: list[str] = field(default_factory=list)
    beside: dict[str, Any] = field(default_factory=dict)


def write(
    path: str | Path, splits: list[Split], classes: int | None = None, gzip: bool = False, overwrite: bool = False
) -> None:
    """Write a file that `lbpar.data.hdf5.Hdf5Dataset` reads, or add splits to one.

    Parameters
    ----------
    path : str or Path
        The file; other splits in it are kept.
    splits : list of Split
        At most one per name.
    classes : int, optional
        Number of classes of splits that do not say.
    gzip : bool
        Compress, in chunks of one sample or less. Plain storage reads random samples faster.
    overwrite : bool
        Replace splits of the same names.

    Raises
    ------
    DataError
        The file cannot be written, something would be lost, or samples and targets do not fit each other.
    """
    for s in splits:
        check_samples(s.x, s.y, f"{path}: split '{s.name or '/'}'")
    path, kept = destination(path, [s.name for s in splits], overwrite)
    if not gzip:
        check_room(path, sum(prod(a.shape) * a.dtype.itemsize for s in splits for a in (s.x, s.y)))
    with new_file(path, kept) as (file, check):
        for s in splits:
            group = file.create_group(s.name) if s.name else file
            for name, source in (("x", s.x), ("y", s.y)):
                bad = _fill(group, name, source, gzip and len(source.shape) > 1, check)
                if bad:
                    s.remarks.append(f"{name} is not finite in {len(bad)} samples, the first of which is {bad[0]}")
            for name, values in s.beside.items():
                group[name] = values
            group["x"].attrs.update(s.attributes)
            number = s.classes or classes
            if number and is_label(s.y):
                names = [n.encode() for n in s.class_names] if len(s.class_names) == number else []
                fits = 0 < len(names) * max(map(len, names), default=0) < _MOST_BYTES
                group["y"].attrs["classes"] = np.array(names) if fits else number


def _fill(group: Any, name: str, source: Any, gzip: bool, check: Callable[[], None]) -> list[int]:
    """Write one array; returns which samples hold values that are not finite."""
    options: dict[str, Any] = {}
    if gzip and 0 not in source.shape:
        options = {"compression": "gzip", "chunks": _chunk(source.shape, source.dtype.itemsize), "shuffle": True}
    out = group.create_dataset(name, source.shape, source.dtype.newbyteorder("="), **options)
    bad: list[int] = []
    for where, part in pieces(source):
        if part.dtype.kind == "f":
            bad += (where[0].start + np.flatnonzero(~np.isfinite(part.reshape(len(part), -1)).all(axis=1))).tolist()
        with uninterrupted():
            out[where] = part
        check()
    return list(dict.fromkeys(bad))


def _chunk(shape: tuple[int, ...], itemsize: int, most: int = 1 << 20) -> tuple[int, ...]:
    """One sample, its first spatial dimensions halved until it takes at most ``most`` bytes."""
    chunk = [1, *shape[1:]]
    for d in range(1, len(chunk)):
        while prod(chunk) * itemsize > most and chunk[d] > 1:
            chunk[d] = -(-chunk[d] // 2)
    return tuple(chunk)
