"""Write HDF5 datasets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
class Further:
    """A further input or target of a split: an array, `Rows`, or anything with a shape, a dtype and slices, and what is stored with it."""

    values: Any
    attributes: dict[str, Any]
    is_input: bool


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
    names : (str, str)
        What x and y are called in the file.
    further : dict of Further
        Of several inputs and targets, the others by their names.
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
    names: tuple[str, str] = ("x", "y")
    further: dict[str, Further] = field(default_factory=dict)

    def arrays(self) -> dict[str, Any]:
        """All that is stored, by name."""
        return dict(zip(self.names, (self.x, self.y), strict=True)) | {n: f.values for n, f in self.further.items()}


def write(
    path: str | Path,
    splits: list[Split],
    classes: int | None = None,
    gzip: bool = False,
    overwrite: bool = False,
    chunk: Sequence[int] | None = None,
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
    chunk : sequence of int, optional
        Compress in chunks of this part of a sample instead; what has fewer dimensions takes the first of them.

    Raises
    ------
    DataError
        The file cannot be written, something would be lost, or samples and targets do not fit each other.
    """
    for s in splits:
        check_samples(s.x, s.y, f"{path}: split '{s.name or '/'}'")
    path, kept = destination(path, [s.name for s in splits], overwrite)
    if not gzip and chunk is None:
        check_room(path, sum(prod(a.shape) * a.dtype.itemsize for s in splits for a in s.arrays().values()))
    with new_file(path, kept) as (file, check):
        for s in splits:
            group = file.create_group(s.name) if s.name else file
            for name, source in s.arrays().items():
                bad = _fill(group, name, source, _stored(source, gzip, chunk), check, name == s.names[1])
                if bad:
                    s.remarks.append(f"{name} is not finite in {len(bad)} samples, the first of which is {bad[0]}")
            for name, values in s.beside.items():
                group[name] = values
            for name, more in s.further.items():
                group[name].attrs.update(more.attributes)
            x, y = s.names
            group[x].attrs.update(s.attributes)
            number = s.classes or classes
            if number and is_label(s.y):
                names = [n.encode() for n in s.class_names] if len(s.class_names) == number else []
                fits = 0 < len(names) * max(map(len, names), default=0) < _MOST_BYTES
                group[y].attrs["classes"] = np.array(names) if fits else number


def _stored(source: Any, gzip: bool, chunk: Sequence[int] | None) -> dict[str, Any]:
    """How h5py is to store an array."""
    shape = source.shape
    if len(shape) < 2 or 0 in shape or not (gzip or chunk):
        return {}
    part = _chunk(shape, source.dtype.itemsize) if chunk is None else (1, *map(min, shape[1:], [*chunk, *shape[1:]]))
    return {"compression": "gzip", "chunks": part, "shuffle": True}


def _fill(
    group: Any, name: str, source: Any, options: dict[str, Any], check: Callable[[], None], target: bool
) -> list[int]:
    """Write one array, with the range of labels of a target; returns which samples hold values that are not finite."""
    out = group.create_dataset(name, source.shape, source.dtype.newbyteorder("="), **options)
    bad: list[int] = []
    ends: list[Any] = []
    for where, part in pieces(source):
        if part.dtype.kind == "f":
            bad += (where[0].start + np.flatnonzero(~np.isfinite(part.reshape(len(part), -1)).all(axis=1))).tolist()
        elif target and part.size:
            ends += [part.min(), part.max()]
        with uninterrupted():
            out[where] = part
        check()
    if ends:
        out.attrs["label_range"] = np.array([min(ends), max(ends)], source.dtype)
    return list(dict.fromkeys(bad))


def _chunk(shape: tuple[int, ...], itemsize: int, most: int = 1 << 20) -> tuple[int, ...]:
    """One sample, its first spatial dimensions halved until it takes at most ``most`` bytes."""
    chunk = [1, *shape[1:]]
    for d in range(1, len(chunk)):
        while prod(chunk) * itemsize > most and chunk[d] > 1:
            chunk[d] = -(-chunk[d] // 2)
    return tuple(chunk)
