"""Write HDF5 datasets: all of a file or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.config.paths import as_path
from lbpar.errors import DataError

Array = NDArray[Any]
_PIECE = 1 << 24  # bytes written at a time


@dataclass(frozen=True)
class Split:
    """What to store for one split: arrays, or anything with a shape, a dtype and slices (a memory map).

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


@contextmanager
def new_file(path: str | Path) -> Iterator[Any]:
    """Open a new HDF5 file that takes its name only when the block ends well.

    Raises
    ------
    DataError
        The directory or file cannot be written.
    """
    import h5py

    path = as_path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.is_dir():
            raise DataError(f"{path}: it is a directory, expected the name of a file to write.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(part, "w") as file:
            yield file
        os.replace(part, path)
    except OSError as e:
        raise DataError(f"{path}: cannot write: {e.strerror or e}.") from None
    finally:
        with suppress(OSError):  # it may never have been made
            part.unlink()


def write(path: str | Path, splits: list[Split], classes: int | None = None, gzip: bool = False) -> None:
    """Write a file that `lbpar.data.hdf5.Hdf5Dataset` reads.

    Parameters
    ----------
    path : str or Path
        The file; an existing one is replaced once the new one is complete.
    splits : list of Split
        At most one per name.
    classes : int, optional
        Number of classes.
    gzip : bool
        Compress, in chunks of one sample or less. Plain storage reads random samples faster.

    Raises
    ------
    DataError
        The file cannot be written, or samples and targets differ in number.
    """
    for s in splits:
        if len(s.x) != len(s.y):
            raise DataError(
                f"{path}: split '{s.name}' has {len(s.x)} samples and {len(s.y)} targets, expected as many."
            )
    with new_file(path) as file:
        for s in splits:
            group = file.create_group(s.name) if s.name else file
            x = _fill(group, "x", s.x, gzip)
            for name, value in s.attributes.items():
                x.attrs[name] = value
            y = _fill(group, "y", s.y, gzip and len(s.y.shape) > 1)
            if classes is not None:
                y.attrs["classes"] = classes


def _fill(group: Any, name: str, source: Any, gzip: bool) -> Any:
    options: dict[str, Any] = {}
    if gzip and 0 not in source.shape:
        options = {"compression": "gzip", "chunks": _chunk(source.shape, source.dtype.itemsize), "shuffle": True}
    out = group.create_dataset(name, source.shape, source.dtype, **options)
    row = max(1, prod(source.shape[1:]) * source.dtype.itemsize)
    step = max(1, _PIECE // row)
    for at in range(0, len(source), step):
        out[at : at + step] = source[at : at + step]
    return out


def _chunk(shape: tuple[int, ...], itemsize: int, most: int = 1 << 20) -> tuple[int, ...]:
    """One sample, its first spatial dimensions halved until it takes at most ``most`` bytes."""
    chunk = [1, *shape[1:]]
    for d in range(1, len(chunk)):
        while prod(chunk) * itemsize > most and chunk[d] > 1:
            chunk[d] = -(-chunk[d] // 2)
    return tuple(chunk)


def channel_moments(x: Any, scale: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and standard deviation per channel of ``scale * x``, over samples and space, in float64.

    Constant channels get the deviation 1, so that dividing by it is harmless.
    """
    axes = tuple(range(len(x.shape) - 1))
    count, total, squares = 0, np.zeros(x.shape[-1]), np.zeros(x.shape[-1])
    step = max(1, _PIECE // max(1, prod(x.shape[1:]) * 8))
    for at in range(0, len(x), step):
        part = x[at : at + step].astype(np.float64) * scale
        count += part.size // part.shape[-1]
        total += part.sum(axis=axes)
        squares += (part * part).sum(axis=axes)
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return mean, np.where(std > 1e-12, std, 1.0)
