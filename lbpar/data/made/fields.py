"""Gaussian random fields with a known spectrum, whose parameters are the targets: volumes of any size to regress on."""

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


def make_volumes(
    path: str | Path,
    shape: Sequence[int],
    samples: int = 256,
    test_samples: int = 64,
    seed: int = 0,
    gzip: bool = False,
    overwrite: bool = False,
) -> None:
    """Write fields (samples, D, H, W, C) as float32, and their parameters, each from -1 to 1, as real targets (samples, 3).

    Channels are independent fields of the same parameters. Fields are made and written one after the other; a field is made whole.

    Parameters
    ----------
    path : str or Path
        The file to write.
    shape : sequence of int
        Of one sample, (D, H, W, C) or (H, W, C).
    samples, test_samples : int
        Sizes of the two splits; without test samples there is no ``/test``.
    seed : int
        Another seed makes other data.
    gzip, overwrite : bool
        See `lbpar.data.writer.write`.

    Raises
    ------
    DataError
        A size below 1 (of space: 4), or the file cannot be written.
    """
    shape = tuple(shape)
    if len(shape) not in (3, 4) or min(shape[:-1]) < 4 or min((samples, shape[-1])) < 1 or test_samples < 0:
        raise DataError(
            f"make volumes: got {samples} and {test_samples} samples of shape {shape}, expected at least one of [D] H W C, with "
            "extents of at least 4."
        )
    splits = []
    for name, n, salt in (("train", samples, 0), ("test", test_samples, 1)):
        if n:
            key = fold(seed, zlib.crc32(name.encode()), salt)
            x = Rows((n, *shape), np.float32, partial(_fields, key, shape))
            splits.append(Split(name, x, parameters(key, np.arange(n)).astype(np.float32)))
    write(path, splits, gzip=gzip, overwrite=overwrite)


def parameters(key: int, samples: NDArray[np.int64]) -> Array:
    """Tilt, cut and amplitude of each sample, from -1 to 1."""
    return 2 * uniform(key, 3 * samples[:, None].astype(np.uint64) + np.arange(3, dtype=np.uint64)) - 1


def spectrum(space: Sequence[int], tilt: float, cut: float, amplitude: float) -> Array:
    """Power of each mode of `numpy.fft.rfftn`: ``A k^(tilt - 2) exp(-(k / k_c)²)``, with k in radians per voxel.

    ``k_c`` is ``(π / 4) 2^cut``; A is such that the field's standard deviation is ``exp(amplitude / 2)``. There is no mean.
    """
    axes = [2 * np.pi * (np.fft.rfftfreq if i == len(space) - 1 else np.fft.fftfreq)(e) for i, e in enumerate(space)]
    k = np.sqrt(sum(a * a for a in np.ix_(*axes)))
    k.flat[0] = 1.0
    power: Array = k ** (tilt - 2) * np.exp(-((k / (np.pi / 4 * 2.0**cut)) ** 2))
    power.flat[0] = 0.0
    # Of the last dimension, modes that are left out are those that have a twin.
    twins = np.full(power.shape[-1], 2.0)
    twins[0] = 1.0
    if space[-1] % 2 == 0:
        twins[-1] = 1.0
    return power * (np.exp(amplitude) * np.prod(space) / (power * twins).sum())


def _fields(key: int, shape: tuple[int, ...], rows: NDArray[np.int64]) -> Array:
    *space, channels = shape
    out, size = np.empty((len(rows), *shape), np.float32), int(np.prod(space))
    for field, row, own in zip(out, rows.tolist(), parameters(key, rows), strict=True):
        factor = np.sqrt(spectrum(space, *own))
        for c in range(channels):
            white = normal(fold(key, row + 1, c), np.arange(size, dtype=np.uint64)).reshape(space)
            field[..., c] = np.fft.irfftn(np.fft.rfftn(white) * factor, s=space, axes=range(len(space)))
    return out
