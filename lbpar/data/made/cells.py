"""Made-up pictures as of a microscope: bright ellipses under uneven light, blurred and noisy, with a class per pixel."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.pieces import Rows
from lbpar.data.writer import Split, write
from lbpar.errors import DataError
from lbpar.random import fold, normal, uniform

Array = NDArray[Any]
_AREA = 4096
"""Pixels for each cell."""


def make_cells(
    path: str | Path,
    shape: Sequence[int],
    samples: int = 16,
    test_samples: int = 4,
    seed: int = 0,
    gzip: bool = False,
    overwrite: bool = False,
) -> None:
    """Write pictures (samples, H, W, 1) as float32, and for each pixel whether it is inside of a cell.

    Parameters
    ----------
    path : str or Path
        The file to write.
    shape : sequence of int
        Of one sample, (H, W, 1).
    samples, test_samples : int
        Sizes of the two splits; without test samples there is no ``/test``.
    seed : int
        Another seed makes other data.
    gzip, overwrite : bool
        See `lbpar.data.writer.write`.

    Raises
    ------
    DataError
        A size that is too small, or the file cannot be written.
    """
    shape = tuple(shape)
    if len(shape) != 3 or shape[2] != 1 or min(shape[:2]) < 16 or samples < 1 or test_samples < 0:
        raise DataError(
            f"make cells: got {samples} and {test_samples} samples of shape {shape}, expected at least one of H W 1, with extents of at "
            "least 16."
        )
    splits = []
    for name, n in (("train", samples), ("test", test_samples)):
        if n:
            key = fold(seed, zlib.crc32(f"cells.{name}".encode()))
            x = Rows((n, *shape), np.float32, partial(_pictures, key, shape))
            y = Rows((n, *shape[:2]), np.uint8, partial(_masks, key, shape))
            splits.append(Split(name, x, y, classes=2, class_names=("background", "cell")))
    write(path, splits, gzip=gzip, overwrite=overwrite)


def _pictures(key: int, shape: tuple[int, ...], rows: NDArray[np.int64]) -> Array:
    out = np.empty((len(rows), *shape), np.float32)
    for picture, row in zip(out, rows.tolist(), strict=True):
        own = fold(key, row)
        light, at = uniform(fold(own, 1), np.arange(2)), [np.linspace(-0.5, 0.5, e) for e in shape[:2]]
        uneven = (light[0] - 0.5) * at[0][:, None] + (light[1] - 0.5) * at[1]
        noise = normal(fold(own, 2), np.arange(shape[0] * shape[1])).reshape(shape[:2])
        picture[..., 0] = _brightness(own, shape) + uneven + 0.3 * noise
    return out


def _masks(key: int, shape: tuple[int, ...], rows: NDArray[np.int64]) -> Array:
    return np.stack([_brightness(fold(key, row), shape) > 0 for row in rows.tolist()]).astype(np.uint8)


def _brightness(key: int, shape: tuple[int, ...]) -> Array:
    """Of each pixel that of the cell it lies in, else 0."""
    height, width = shape[:2]
    out = np.zeros((height, width))
    for y, x, a, b, turn, bright in uniform(key, np.arange(6 * max(1, height * width // _AREA))).reshape(-1, 6):
        y, x, a, b, turn = y * height, x * width, 6 + 18 * a, 6 + 18 * b, np.pi * turn
        lo, hi = (max(0, int(c - 25)) for c in (y, x))
        dy, dx = np.ogrid[lo : min(height, int(y + 26)), hi : min(width, int(x + 26))]
        dy, dx = dy - y, dx - x
        along, across = np.cos(turn) * dy + np.sin(turn) * dx, np.cos(turn) * dx - np.sin(turn) * dy
        part = out[lo : lo + along.shape[0], hi : hi + along.shape[1]]
        part[(along / a) ** 2 + (across / b) ** 2 < 1] = 0.4 + 0.6 * bright
    return out
