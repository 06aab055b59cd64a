"""Make datasets: real handwritten digits, or random samples of any shape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.pieces import Rows
from lbpar.data.synthetic import SyntheticDataset
from lbpar.data.writer import Split, write
from lbpar.errors import DataError


def make_digits(path: str | Path, size: int = 8, gzip: bool = False, overwrite: bool = False) -> None:
    """Write the 1,797 handwritten digits of 8 × 8 pixels that scikit-learn ships, as float32 from 0 to 1.

    Every third sample (indices 2, 5, 8, ...; 599 of them) is in ``/test``, the other 1,198 in ``/train``.

    Parameters
    ----------
    path : str or Path
        The file to write.
    size : int
        Height and width; a multiple of 8, each pixel repeated.
    gzip : bool
        Compress.
    overwrite : bool
        Replace splits that the file has.

    Raises
    ------
    DataError
        scikit-learn is missing, the size is no multiple of 8, or the file cannot be written.

    References
    ----------
    E. Alpaydin and C. Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository, 1998.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "make digits: scikit-learn, which ships the digits, is not installed; `pip install lbpar[digits]`."
        ) from None
    if size % 8 or not 8 <= size <= 8192:
        raise DataError(f"make digits: got the size {size}, expected a multiple of 8 up to 8,192.")
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    test = np.arange(len(labels)) % 3 == 2
    splits = []
    for name, pick in (("train", np.flatnonzero(~test)), ("test", np.flatnonzero(test))):
        x = Rows((len(pick), size, size, 1), np.float32, partial(_enlarged, images[pick], size // 8))
        splits.append(Split(name, x, labels[pick].astype(np.int64), classes=10))
    write(path, splits, gzip=gzip, overwrite=overwrite)


def _enlarged(images: NDArray[Any], times: int, rows: NDArray[np.int64]) -> NDArray[Any]:
    return images[rows].repeat(times, axis=1).repeat(times, axis=2)


def make_synthetic(
    path: str | Path,
    shape: Sequence[int],
    samples: int = 256,
    test_samples: int = 64,
    classes: int = 10,
    per_voxel: bool = False,
    uint8: bool = False,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Write random samples with random labels.

    Parameters
    ----------
    path : str or Path
        The file to write.
    shape : sequence of int
        Shape of one sample, ([D], H, W, C).
    samples, test_samples : int
        Sizes of the two splits; without test samples there is no ``/test``.
    classes : int
        Number of classes.
    per_voxel : bool
        A label per voxel instead of one per sample.
    uint8 : bool
        Store bytes from 0 to 255 instead of float32 with mean 0 and variance 1.
    seed : int
        Another seed makes other data.
    overwrite : bool
        Replace splits that the file has.

    Raises
    ------
    DataError
        A size below 1, or the file cannot be written.
    """
    shape = tuple(shape)
    if min((samples, classes, *shape)) < 1 or test_samples < 0 or not 1 <= len(shape) <= 4 or classes >= 1 << 31:
        raise DataError(
            f"make synthetic: got {samples} and {test_samples} samples of shape {shape} in {classes} classes, "
            "expected sizes of at least 1, a shape of 1 to 4 numbers, and fewer than 2³¹ classes."
        )
    target = shape[:-1] if per_voxel else ()
    splits = []
    for name, n, salt in (("train", samples, 0), ("test", test_samples, 1)):
        if n:
            source = SyntheticDataset(n, shape, target, classes, seed=2 * seed + salt, distinct=n)
            x = Rows((n, *shape), np.uint8 if uint8 else np.float32, partial(_bytes, source) if uint8 else source.read)
            splits.append(Split(name, x, Rows((n, *target), np.int64, source.read_targets), classes=classes))
    write(path, splits, overwrite=overwrite)


def _bytes(source: SyntheticDataset, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Values within ±√3 as 0 to 255."""
    return np.clip(np.floor((source.read(rows) / np.sqrt(12) + 0.5) * 256), 0, 255).astype(np.uint8)
