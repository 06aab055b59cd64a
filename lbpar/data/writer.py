"""Write HDF5 datasets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lbpar.data.new_file import check_room, destination, new_file
from lbpar.errors import DataError
from lbpar.hdf5_file import uninterrupted

Array = NDArray[Any]
_PIECE = 1 << 24  # bytes written at a time


class Rows:
    """Samples that are made or read a few at a time.

    Parameters
    ----------
    shape : tuple of int, (samples, ...)
    dtype : dtype
    read : callable
        Takes increasing indices, returns those samples.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, read: Callable[[NDArray[np.int64]], Array]) -> None:
        self.shape, self.ndim, self.dtype, self._read = shape, len(shape), np.dtype(dtype), read

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Array:
        return self._read(np.arange(*rows.indices(len(self))))


@dataclass(frozen=True)
class Split:
    """What to store for one split: arrays, `Rows`, or anything with a shape, a dtype and slices (a memory map).

    Parameters
    ----------
    name : str
        ``train``, ``test``, or empty for the root of the file.
    x : array, (samples, [D], H, W, C)
        floats or uint8.
    y : array, (samples,), (samples, [D], H, W) or real targets
    attributes : dict
        Stored with x: scale, mean, std.
    """

    name: str
    x: Any
    y: Any
    attributes: dict[str, Any] = field(default_factory=dict)


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
        Number of classes.
    gzip : bool
        Compress, in chunks of one sample or less. Plain storage reads random samples faster.
    overwrite : bool
        Replace splits of the same names.

    Raises
    ------
    DataError
        The file cannot be written, something would be lost, or samples and targets differ in number.
    """
    for s in splits:
        if len(s.x) != len(s.y):
            raise DataError(
                f"{path}: split '{s.name}' has {len(s.x)} samples and {len(s.y)} targets, expected as many."
            )
    path, kept = destination(path, [s.name for s in splits], overwrite)
    if not gzip:
        check_room(path, sum(prod(a.shape) * a.dtype.itemsize for s in splits for a in (s.x, s.y)))
    with new_file(path, kept) as (file, check):
        for s in splits:
            group = file.create_group(s.name) if s.name else file
            x = _fill(group, "x", s.x, gzip, check)
            for name, value in s.attributes.items():
                x.attrs[name] = value
            y = _fill(group, "y", s.y, gzip and len(s.y.shape) > 1, check)
            if classes is not None:
                y.attrs["classes"] = classes


def _fill(group: Any, name: str, source: Any, gzip: bool, check: Callable[[], None]) -> Any:
    options: dict[str, Any] = {}
    if gzip and 0 not in source.shape:
        options = {"compression": "gzip", "chunks": _chunk(source.shape, source.dtype.itemsize), "shuffle": True}
    out = group.create_dataset(name, source.shape, source.dtype, **options)
    row = max(1, prod(source.shape[1:]) * source.dtype.itemsize)
    step = max(1, _PIECE // row)
    for at in range(0, len(source), step):
        part = source[at : at + step]
        with uninterrupted():
            out[at : at + step] = part
        check()
    return out


def _chunk(shape: tuple[int, ...], itemsize: int, most: int = 1 << 20) -> tuple[int, ...]:
    """One sample, its first spatial dimensions halved until it takes at most ``most`` bytes."""
    chunk = [1, *shape[1:]]
    for d in range(1, len(chunk)):
        while prod(chunk) * itemsize > most and chunk[d] > 1:
            chunk[d] = -(-chunk[d] // 2)
    return tuple(chunk)
