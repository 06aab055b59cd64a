"""A split of an HDF5 file, read hyperslab by hyperslab without MPI.

Every rank reads on its own (collective reads hang when a rank has nothing to read), and a handle is opened only at the
first read and again after a fork, because HDF5 handles do not survive one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lbpar.config.paths import as_path
from lbpar.data.box import check_box, pieces, to_runs
from lbpar.data.normalise import Normalisation
from lbpar.errors import DataError
from lbpar.hdf5_file import uninterrupted
from lbpar.layout.runs import Box, box_shape, indices, whole
from lbpar.text import nearest

Array = NDArray[Any]
_log = logging.getLogger("lbpar")
_SCAN = 1 << 22  # labels read at a time when all are checked


class Hdf5Dataset:
    """Samples ``x`` and targets ``y`` of one split of a file.

    Parameters
    ----------
    path : str or Path
        The file.
    split : str
        Group to use; the root of the file if it has no such group.
    x, y : str
        Names of the two datasets: x (samples, [D], H, W, C) of floats or uint8, C-ordered; y (samples,) or
        (samples, [D], H, W) whole-number labels, or real targets of any shape.
    classes : int, optional
        Number of classes where the file does not say; labels must lie below both.
    dtype : dtype
        float32 or float64: what reading returns.
    cache : int, bytes
        A box that takes no more than this over all samples is read once and kept.

    Raises
    ------
    DataError
        Missing, truncated or foreign file, missing dataset (with the nearest name), wrong shape or type.

    Notes
    -----
    x is returned as ``(x * scale - mean) / std``: attributes of the dataset x, or of its group. ``scale`` defaults to
    1/255 for uint8 and 1 for floats, ``mean`` and ``std`` (one number, or one per channel) to 0 and 1. Attribute
    ``classes`` of y or of the group gives the number of classes.
    """

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        *,
        x: str = "x",
        y: str = "y",
        classes: int | None = None,
        dtype: DTypeLike = np.float32,
        cache: int = 0,
    ) -> None:
        self._path, self._dtype, self._room = as_path(path), np.dtype(dtype), cache
        self._file: Any = None
        self._pid = -1
        self._kept: dict[tuple[str, Box], Array] = {}
        self.classes: int | None = None
        self.normalisation = Normalisation()
        with closing(self), self._errors():
            self._open()
            self._read_header(split, x, y, classes)

    def __len__(self) -> int:
        return self._length

    def read(self, samples: NDArray[np.int64], box: Box | None = None) -> Array:
        """See `lbpar.data.dataset.Dataset.read`."""
        box = whole(self.sample_shape) if box is None else box
        check_box(box, self.sample_shape, self.name)
        x = self._part(self._x, np.asarray(samples, np.int64), box)
        return self.normalisation(x, self._dtype, indices(box[-1]))

    def read_targets(self, samples: NDArray[np.int64], box: Box | None = None) -> Array:
        """See `lbpar.data.dataset.Dataset.read_targets`."""
        box = whole(self.target_shape) if box is None else box
        check_box(box, self.target_shape, self.name)
        return self._part(self._y, np.asarray(samples, np.int64), box).astype(np.int64 if self._labels else self._dtype)

    def normalise_like(self, other: Normalisation) -> None:
        """Take mean and standard deviation of other data; says so where the file names its own."""
        own, self.normalisation = self.normalisation, self.normalisation.like(other)
        if own != self.normalisation and (own.mean, own.std) != (None, None):
            _log.warning(
                "%s: mean and std differ from the training data's, which are used: the network was trained with them.",
                self.name,
            )

    def close(self) -> None:
        """Close the file; the next read opens it again. What is kept in memory stays."""
        if self._file is not None and self._pid == os.getpid():
            self._file.close()
        self._file = None

    def check_labels(self) -> None:
        """Read all labels, a few million at a time, and refuse those out of range; real targets are not read.

        Where neither file nor caller gave the number of classes, it becomes the largest label plus one.

        Raises
        ------
        DataError
            A label below 0 or not below the number of classes.
        """
        if not self._labels:
            return
        top, rows = -1, max(1, _SCAN // max(1, prod(self.target_shape)))
        with closing(self), self._errors():
            y = self._open()[self._y]
            for at in range(0, len(self), rows):
                part = y[at : at + rows]
                if not part.size:
                    continue
                low, high = int(part.min()), int(part.max())
                top = max(top, high)
                limit = self.classes
                if low < 0 or (limit is not None and high >= limit):
                    bad = low if low < 0 else high
                    first = at + int(np.argwhere(part == bad)[0][0])
                    allowed = f"0 to {limit - 1} ({limit} classes)" if limit is not None else "0 or more"
                    raise DataError(
                        f"{self.name}: got the label {bad} in sample {first} of '{self._y}', expected {allowed}. "
                        "Correct the labels or the network's number of classes."
                    )
        if self.classes is None:
            self.classes = top + 1

    def _part(self, name: str, samples: NDArray[np.int64], box: Box) -> Array:
        """Read a box of the given samples of one dataset, in the type of the file, in the order asked for."""
        shape = box_shape(box)
        if len(samples) and not (samples.min() >= 0 and samples.max() < len(self)):
            bad = samples[(samples < 0) | (samples >= len(self))][0]
            raise DataError(f"{self.name}: got the sample index {bad}, expected 0 to {len(self) - 1}.")
        if not len(samples) or 0 in shape:
            return np.empty((len(samples), *shape), self._types[name])
        kept = self._kept.get((name, box))
        if kept is None:
            size = prod(shape) * len(self) * self._types[name].itemsize
            if sum(a.nbytes for a in self._kept.values()) + size <= self._room:
                kept = self._kept[name, box] = self._slabs(name, np.arange(len(self)), box)
        if kept is not None:
            return kept[samples]
        unique, order = np.unique(samples, return_inverse=True)
        slabs = self._slabs(name, unique, box)
        return slabs if np.array_equal(unique, samples) else slabs[order]

    def _slabs(self, name: str, samples: NDArray[np.int64], box: Box) -> Array:
        """Read increasing samples, neighbours in one go."""
        out = np.empty((len(samples), *box_shape(box)), self._types[name])
        at = 0
        with self._errors():
            source = self._open()[name]
            for lo, hi in to_runs(samples):
                for from_, to in pieces(box):
                    if all(s.stop > s.start for s in from_):
                        source.read_direct(out, (slice(lo, hi), *from_), (slice(at, at + hi - lo), *to))
                at += hi - lo
        return out

    def _open(self) -> Any:
        if self._file is None or self._pid != os.getpid():
            import h5py

            self._file = h5py.File(self._path, "r", locking="best-effort")
            self._pid = os.getpid()
        return self._file

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with uninterrupted():
                yield
        except FileNotFoundError:
            raise DataError(
                f"{self._path}: no such file; make one with `python -m lbpar.data make` or `convert`, "
                "or correct `data` in the run file."
            ) from None
        except (OSError, KeyError, RuntimeError) as e:  # h5py raises all three on damaged files
            text = " ".join(str(e).split())
            reason = f"it cannot be read ({text})"
            if self._path.is_dir():
                reason = "it is a directory"
            elif "truncated" in text:
                reason = "it is truncated; write it again"
            elif "signature" in text:
                reason = "it is not an HDF5 file; `python -m lbpar.data convert` makes one"
            raise DataError(f"{self._path}: expected an HDF5 file, but {reason}.") from None

    def _read_header(self, split: str, x: str, y: str, classes: int | None) -> None:
        import h5py

        inside = split if isinstance(self._file.get(split), h5py.Group) else ""
        group = self._file[inside] if inside else self._file
        self.name = f"{self._path}:/{inside}"
        xs, ys = self._find(group, x, split), self._find(group, y, split)
        self._x, self._y = xs.name, ys.name
        if xs.dtype.kind != "f" and xs.dtype != np.uint8:
            raise DataError(f"{self.name}: '{x}' has the type {xs.dtype}, expected uint8 or floating point.")
        if not 2 <= xs.ndim <= 5 or 0 in xs.shape[1:]:
            raise DataError(
                f"{self.name}: '{x}' has the shape {xs.shape}, expected (samples, [D], [H], [W], C): channels last, "
                "with a channel dimension even for one channel."
            )
        if ys.dtype.kind not in "iufb":
            raise DataError(f"{self.name}: '{y}' has the type {ys.dtype}, expected whole or real numbers.")
        if ys.ndim < 1 or len(ys) != len(xs):
            raise DataError(
                f"{self.name}: '{y}' has the shape {ys.shape}, expected one entry per sample of '{x}' ({len(xs)})."
            )
        self._length = len(xs)
        if not self._length:
            raise DataError(f"{self.name}: '{x}' holds no samples, expected at least one.")
        self.sample_shape, self.target_shape = tuple(xs.shape[1:]), tuple(ys.shape[1:])
        self._labels = ys.dtype.kind in "iub"
        self.storage = f"{xs.dtype}, {f'{xs.compression} chunks {xs.chunks}' if xs.chunks else 'contiguous'}"
        if self._labels and self.target_shape not in ((), self.sample_shape[:-1]):
            raise DataError(
                f"{self.name}: '{y}' has the shape {ys.shape}, expected labels ({self._length},), or one per voxel "
                f"{(self._length, *self.sample_shape[:-1])}; real targets must be stored as floating point."
            )
        self._types = {xs.name: xs.dtype.newbyteorder("="), ys.name: ys.dtype.newbyteorder("=")}
        said = ys.attrs.get("classes", group.attrs.get("classes"))
        if self._labels:
            given = [int(c) for c in (said, classes) if c is not None]
            self.classes = min(given) if given else None
        scale = float(self._attribute(xs, group, "scale", 1 / 255 if xs.dtype == np.uint8 else 1.0))
        mean, std = (self._per_channel(xs, group, name) for name in ("mean", "std"))
        if std is not None and not min(std) > 0:
            raise DataError(f"{self.name}: attribute 'std' is {list(std)}, expected numbers above 0.")
        self.normalisation = Normalisation(scale, mean, std, xs.dtype.kind in "iu")

    def _find(self, group: Any, name: str, split: str) -> Any:
        import h5py

        found = group.get(name)
        if isinstance(found, h5py.Dataset):
            return found
        names = [n for n, o in group.items() if isinstance(o, h5py.Dataset)]
        groups = [n for n, o in group.items() if isinstance(o, h5py.Group)]
        have = f"datasets {', '.join(names) or 'none'}" + (f"; groups {', '.join(groups)}" if groups else "")
        near = nearest(name, names)
        hint = f"; {near}" if near else ". "
        raise DataError(
            f"{self.name}: no dataset '{name}' for the split '{split}'{hint}There are {have}. "
            "Name them in the run file (data.x, data.y)."
        )

    def _attribute(self, dataset: Any, group: Any, name: str, default: Any) -> Any:
        value = dataset.attrs.get(name, group.attrs.get(name, default))
        if value is not None and np.asarray(value).dtype.kind not in "iuf":
            raise DataError(f"{self.name}: attribute '{name}' is {value!r}, expected numbers.")
        return value

    def _per_channel(self, dataset: Any, group: Any, name: str) -> tuple[float, ...] | None:
        value = self._attribute(dataset, group, name, None)
        if value is None:
            return None
        channels = self.sample_shape[-1]
        values = np.asarray(value, np.float64).reshape(-1)
        if values.size not in (1, channels):
            raise DataError(f"{self.name}: attribute '{name}' has {values.size} numbers, expected 1 or {channels}.")
        return tuple(np.broadcast_to(values, (channels,)).tolist())
