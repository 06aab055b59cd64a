"""HDF5 files as splits of a new one: other names, another type, other chunks, a share for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.info import splits_of
from lbpar.data.pieces import Rows
from lbpar.data.writer import Further, Split
from lbpar.errors import DataError
from lbpar.layout.runs import whole
from lbpar.random import bits, fold

_SHARE = 11


def read_hdf5(
    path: Path,
    split: str,
    x: Sequence[str],
    y: Sequence[str],
    dtype: str | None = None,
    share: float | None = None,
) -> list[Split]:
    """The splits in a file, train first.

    Parameters
    ----------
    path : Path
    split : str
        Name of the only split where the file has none.
    x, y : sequence of str
        Names of the datasets of samples and targets. Several keep their names; one of each is called x and y.
    dtype : str, optional
        Of the new samples; default as they are.
    share : float, optional
        Make two splits of one, train and test: test has so much of the samples, drawn at random and always alike.

    Raises
    ------
    DataError
        What `Hdf5Dataset` refuses; a share of a file that has several splits, or that leaves one of the two empty.
    """
    if share is not None and not 0 < share < 1:
        raise DataError(f"{path}: got the test share {share:g}, expected a number between 0 and 1, as 0.2.")
    names = splits_of(path, x[0])
    if share is not None and len(names) > 1:
        raise DataError(
            f"{path}: it already has the splits {', '.join(names)}; --test-share divides a file that has a single one."
        )
    out: list[Split] = []
    for name in names:
        where = f"{path}:/{name}" if name else path
        data = Hdf5Dataset(where, name, x=x[0], y=y[0])
        others = {n: Hdf5Dataset(where, name, x=n, y=None) for n in x[1:]}
        others |= {n: Hdf5Dataset(where, name, x=x[0], y=n) for n in y[1:]}
        n, origin = len(data), f"{data.name}, {data.storage}"
        odd = next((k for k, one in others.items() if len(one) != n), None)
        if odd is not None:
            raise DataError(f"{data.name}: '{odd}' has {len(others[odd])} samples, expected {n} as '{x[0]}'.")
        keep = (x[0], y[0]) if others else ("x", "y")

        def made(
            group: str, rows: NDArray[np.int64], words: str, data: Any = data, others: Any = others, keep: Any = keep
        ) -> Split:
            further = {k: _further(one, k in x, rows, dtype) for k, one in others.items()}
            return replace(_split(data, group, rows, dtype, words), names=keep, further=further)

        if share is None:
            out.append(made(name or split, np.arange(n), origin))
            continue
        order = np.argsort(bits(fold(0, _SHARE), np.arange(n)), kind="stable")
        tests = round(n * share)
        if not 0 < tests < n:
            raise DataError(f"{path}: a test share of {share:g} of {n} samples leaves one split empty; choose another.")
        out.append(made("train", np.sort(order[tests:]), f"{origin}: {n - tests} of {n} samples"))
        out.append(made("test", np.sort(order[:tests]), f"{origin}: {tests} of {n} samples"))
    if len({s.attributes.get("scale") for s in out}) > 1:
        raise DataError(f"{path}: its splits have different attributes 'scale'; convert them into files of their own.")
    return out


def _further(data: Hdf5Dataset, is_input: bool, rows: NDArray[np.int64], dtype: str | None) -> Further:
    """One of several inputs or targets, as `_split` makes the first of each."""
    one = _split(data, "", rows, dtype if is_input else None, "")
    if is_input:
        return Further(one.x, one.attributes, True)
    named = {"classes": np.array([n.encode() for n in one.class_names]) if one.class_names else one.classes}
    return Further(one.y, named if one.classes else {}, False)


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
    with np.errstate(invalid="ignore", over="ignore"):  # what does not fit is looked for
        made = part.astype(dtype)
    if part.dtype.kind == "f":
        lost = np.isfinite(part) & ~np.isfinite(made) if dtype.kind == "f" else made != part
    elif dtype.kind == "f":
        lost = np.isinf(made)
    else:
        lost = (part < np.iinfo(dtype).min) | (part > np.iinfo(dtype).max)
    if lost.any():
        first = tuple(np.argwhere(lost)[0].tolist())
        raise DataError(
            f"{data.name}: sample {rows[at[first[0]]]} has the value {part[first]} of type {part.dtype} at {first[1:]}, which {dtype} "
            "cannot hold; choose another --type" + ("." if np.isfinite(part[first]) else ", or mend the sample.")
        )
    return made
