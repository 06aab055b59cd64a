"""HDF5 files as splits of a new one: other names, another type, other chunks, a share for tests."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.info import splits_of
from lbpar.data.pieces import Rows
from lbpar.data.writer import Split
from lbpar.errors import DataError
from lbpar.layout.runs import whole
from lbpar.random import bits, fold

_SHARE = 11


def read_hdf5(
    path: Path, split: str, x: str, y: str, dtype: str | None = None, share: float | None = None
) -> list[Split]:
    """The splits in a file, train first.

    Parameters
    ----------
    path : Path
    split : str
        Name of the only split where the file has none.
    x, y : str
        Names of the datasets of samples and targets.
    dtype : str, optional
        Of the new samples; default as they are.
    share : float, optional
        Make two splits of one, train and test: test has so much of the samples, drawn at random and always alike.

    Raises
    ------
    DataError
        What `Hdf5Dataset` refuses; a share of a file that has several splits, or that leaves one of the two empty.
    """
    names = splits_of(path, x)
    if share is not None and len(names) > 1:
        raise DataError(
            f"{path}: it already has the splits {', '.join(names)}; --test-share divides a file that has a single one."
        )
    out: list[Split] = []
    for name in names:
        data = Hdf5Dataset(f"{path}:/{name}" if name else path, name, x=x, y=y)
        n, origin = len(data), f"{data.name}, {data.storage}"
        if share is None:
            out.append(_split(data, name or split, np.arange(n), dtype, origin))
            continue
        order = np.argsort(bits(fold(0, _SHARE), np.arange(n)), kind="stable")
        tests = round(n * share)
        if not 0 < tests < n:
            raise DataError(f"{path}: a test share of {share:g} of {n} samples leaves one split empty; choose another.")
        out.append(_split(data, "train", np.sort(order[tests:]), dtype, f"{origin}: {n - tests} of {n} samples"))
        out.append(_split(data, "test", np.sort(order[:tests]), dtype, f"{origin}: {tests} of {n} samples"))
    if len({s.attributes.get("scale") for s in out}) > 1:
        raise DataError(f"{path}: its splits have different attributes 'scale'; convert them into files of their own.")
    return out


def _split(data: Hdf5Dataset, name: str, rows: NDArray[np.int64], dtype: str | None, origin: str) -> Split:
    kinds = [data.stored_type(targets) for targets in (False, True)]
    new = kinds[0] if dtype is None else np.dtype(dtype)
    change = data.normalisation
    attributes: dict[str, Any] = {n: list(v) for n in ("mean", "std") if (v := getattr(change, n)) is not None}
    if change.scale != (1 / 255 if new == np.uint8 else 1.0):
        attributes["scale"] = change.scale
    x = Rows((len(rows), *data.sample_shape), new, partial(_read, data, False, rows, new))
    y = Rows((len(rows), *data.target_shape), kinds[1], partial(_read, data, True, rows, kinds[1]))
    return Split(name, x, y, attributes, data.classes or 0, data.class_names, origin)


def _read(
    data: Hdf5Dataset, targets: bool, rows: NDArray[np.int64], dtype: np.dtype[Any], at: NDArray[np.int64]
) -> NDArray[Any]:
    part = data.stored(rows[at], whole(data.target_shape if targets else data.sample_shape), targets)
    made = part.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(made, part):
        raise DataError(
            f"{data.name}: its samples hold values from {part.min()} to {part.max()} of type {part.dtype}, which {dtype} cannot hold; "
            "choose another --type."
        )
    if dtype.kind == "f" and np.isfinite(part).all() and not np.isfinite(made).all():
        raise DataError(
            f"{data.name}: its samples reach {np.abs(part).max():g}, beyond the range of {dtype}; choose another --type."
        )
    return made
