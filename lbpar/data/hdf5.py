"""A split of an HDF5 file, read hyperslab by hyperslab without MPI.

Every rank reads on its own (collective reads hang when a rank has nothing to read), and a handle is opened only at the
first read and again after a fork, because HDF5 handles do not survive one.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lbpar.config.paths import as_path
from lbpar.data.attributes import as_classes, as_label_range, as_numbers, find_attribute
from lbpar.data.box import middle, pieces, to_runs, touched
from lbpar.data.checks import check_samples, is_label
from lbpar.data.dataset import Dataset
from lbpar.data.normalise import Normalisation
from lbpar.data.pieces import cuts
from lbpar.data.stored import check_stored
from lbpar.data.targets import SCAN, target_pieces
from lbpar.errors import DataError
from lbpar.hdf5_file import uninterrupted
from lbpar.layout.runs import Box, box_intersect, box_shape, box_size, indices, positions, whole
from lbpar.text import nearest

Array = NDArray[Any]
_log = logging.getLogger("lbpar")
_ASKED = 256
"""Boxes that are remembered to have been asked for."""


class Hdf5Dataset(Dataset):
    """Samples ``x`` and targets ``y`` of one split of a file.

    Parameters
    ----------
    path : str or Path
        The file.
    split : str
        Group to use; the root of the file if it has no such group. A path that ends in ``:/GROUP`` means that group, whatever
        the split.
    x, y : str
        Names of the two datasets: x (samples, [D], H, W, C) of whole or real numbers, C-ordered; y (samples,) or
        (samples, [D], H, W) whole-number labels, or real targets of any shape. Without y, samples have no targets.
    classes : int, optional
        Number of classes where the file does not say; labels must lie below both.
    dtype : dtype
        float32 or float64: what reading returns.
    cache : int, bytes
        A box that takes no more than this over all samples is read and kept when it is asked for a second time.

    Attributes
    ----------
    identity : tuple
        The same for two objects that read the same samples, by whatever names.
    class_names : tuple of str
        Empty where the file does not say.

    Raises
    ------
    DataError
        Missing, truncated or foreign file, missing dataset (with the nearest name), wrong shape or type, values that
        were never written or whose file is missing.

    Notes
    -----
    x is returned as ``(x * scale - mean) / std``: attributes of the dataset x, or of its group. ``scale`` defaults to
    1/255 for uint8 and 1 for others, ``mean`` and ``std`` (one number, or one per channel) to 0 and 1. Attribute
    ``classes`` of y or of the group gives the number of classes, or their names.
    """

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        *,
        x: str = "x",
        y: str | None = "y",
        classes: int | None = None,
        dtype: DTypeLike = np.float32,
        cache: int = 0,
    ) -> None:
        self._path, self._dtype, self._room = as_path(path), np.dtype(dtype), cache
        file, colon, group = str(self._path).rpartition(":/")
        self._group = group if colon and not os.path.lexists(self._path) else None
        if self._group:
            self._path = Path(file)
        self._file: Any = None
        self._pid = -1
        self._kept: dict[tuple[str, Box], Array] = {}
        self._asked: set[tuple[str, Box]] = set()
        self.classes: int | None = None
        self.class_names: tuple[str, ...] = ()
        self.normalisation = Normalisation()
        self.statistics: dict[int, Array] = {}  # of samples, by their number
        with closing(self), self._errors():
            self._open()
            self._read_header(split, x, y, classes)

    def __len__(self) -> int:
        return self._length

    def _read(self, samples: NDArray[np.int64], box: Box) -> Array:
        part = self._part(self._x, samples, box)
        own = self._statistics(samples)
        return self.normalisation.checked(part, samples, self.name, self._dtype, indices(box[-1]), own)

    def own_findings(self, samples: range, skip: bool = False) -> tuple[dict[int, Array], set[int]]:
        rule = self.normalisation.rule
        spoilt = self.own_spoilt(samples, targets=True) if skip and self._targets else set()
        if rule is None or not rule.asks:
            return {}, spoilt | (self.own_spoilt(samples) if skip else set())
        found: dict[int, Array] = {}
        with closing(self):
            for i in samples:
                sample = self._whole(i)
                if skip and sample.dtype.kind == "f" and not np.isfinite(sample).all():
                    spoilt.add(i)
                elif i not in spoilt:
                    found[i] = self._statistics_of(i, sample)
        return found, spoilt

    def learn(self, statistics: Mapping[int, Array]) -> None:
        self.statistics |= statistics

    def own_spoilt(self, samples: range, targets: bool = False) -> set[int]:
        """Which of some samples have values, or targets, that are not finite; read a few million at a time."""
        found = set[int]()
        name, shape = (self._y, self.target_shape) if targets else (self._x, self.sample_shape)
        if self._types[name].kind != "f":
            return found
        with closing(self):
            for rows, *planes in cuts((len(samples), *shape), SCAN):
                which, box = np.array(samples[rows]), whole(shape)
                if planes:
                    lo, hi, _ = planes[0].indices(shape[0])
                    box = (((lo, hi),), *box[1:])
                bad = ~np.isfinite(self._slabs(name, which, box).reshape(len(which), -1)).all(axis=1)
                found.update(which[bad].tolist())
        return found

    def _whole(self, i: int) -> Array:
        return self._slabs(self._x, np.array([i]), whole(self.sample_shape))[0]

    def _statistics_of(self, i: int, sample: Array) -> Array:
        self.normalisation.check_finite(sample[None], [i], self.name)
        return self.normalisation.statistics(sample)

    def _statistics(self, samples: NDArray[np.int64]) -> Array | None:
        """Of each of the samples; those that are not known yet are read whole."""
        if self.normalisation.rule is None:
            return None
        for i in samples.tolist():
            if i not in self.statistics:
                self.statistics[i] = self._statistics_of(i, self._whole(i))
        return np.array([self.statistics[i] for i in samples.tolist()]).reshape(-1, 4, self.sample_shape[-1])

    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> Array:
        if not self._targets:
            raise DataError(f"{self.name}: opened without targets; its samples can be predicted, not evaluated.")
        part = self._part(
            self._y, samples, box
        )  # labels stay as narrow as they are stored; kernels widen what they work on
        return part if self._labels else part.astype(self._dtype)

    def normalise_like(self, other: Normalisation) -> None:
        """Take mean and standard deviation of other data; says so where the file names its own.

        Raises
        ------
        DataError
            The file names no scale, and that of its type is not that of the other data.
        """
        if not self._scaled:
            hint = (
                f"Give '{self._x}' of {self._path} the attribute `scale` that makes its numbers those that training saw"
            )
            self.normalisation.check_scale(other, self.name, self._types[self._x], hint)
        own, self.normalisation = self.normalisation, self.normalisation.like(other)
        self.statistics = self.statistics if own.rule == other.rule else {}
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

    def stored_type(self, targets: bool) -> np.dtype[Any]:
        """Of samples or targets in the file."""
        return self._types[self._y if targets else self._x]

    def stored(self, samples: NDArray[np.int64], box: Box, targets: bool = False) -> Array:
        """A box of samples or targets as the file has them."""
        return self._part(self._y if targets else self._x, samples, box)

    def stored_targets(self, *where: slice) -> Array:
        """Targets, sliced in their first dimensions, as stored."""
        with self._errors():
            return self._open()[self._y][where]  # type: ignore[no-any-return]

    def beside(self, *names: str) -> list[Array] | None:
        """What else the file says of each sample, by name; None if one of them is missing."""
        with closing(self), self._errors():
            group = self._open()[self._x].parent
            found = [group[n][...] for n in names if n in group]
        return found if len(found) == len(names) and all(len(a) == len(self) for a in found) else None

    def count_labels(self) -> Counter[int]:
        """How often each label occurs."""
        counts: Counter[int] = Counter()
        with closing(self):
            for _, part in target_pieces(self):
                counts.update(dict(zip(*(a.tolist() for a in np.unique(part, return_counts=True)), strict=True)))
        return counts

    def glance(self, samples: int = 32, elements: int = 1 << 14) -> list[Array]:
        """Samples and targets as stored: all if they are few, else the middle of so many, spread over all of them."""
        parts = []
        with closing(self):
            for name, shape in [(self._x, self.sample_shape), (self._y, self.target_shape)][: 1 + self._targets]:
                few = len(self) * prod(shape) <= samples * elements
                which = np.arange(len(self)) if few else np.linspace(0, len(self) - 1, samples).astype(np.int64)
                parts.append(self._slabs(name, np.unique(which), middle(shape, elements)))
        return parts

    def _part(self, name: str, samples: NDArray[np.int64], box: Box) -> Array:
        """Read a box of the given samples of one dataset, in the type of the file, in the order asked for."""
        shape = box_shape(box)
        if len(samples) and not (samples.min() >= 0 and samples.max() < len(self)):
            bad = samples[(samples < 0) | (samples >= len(self))][0]
            raise DataError(f"{self.name}: got the sample index {bad}, expected 0 to {len(self) - 1}.")
        if not len(samples) or 0 in shape:
            return np.empty((len(samples), *shape), self._types[name])
        kept = self._from_memory(name, samples, box)
        if kept is not None:
            return kept
        unique, order = np.unique(samples, return_inverse=True)
        slabs = self._slabs(name, unique, box)
        return slabs if np.array_equal(unique, samples) else slabs[order]

    def _from_memory(self, name: str, samples: NDArray[np.int64], box: Box) -> Array | None:
        """What is kept, of this box or one around it. A box is kept when it is asked for again: random ones seldom are."""
        for (other, held), kept in self._kept.items():
            if other == name and box_intersect(held, box) == box:
                for d, (part, around) in enumerate(zip(box, held, strict=True), 1):
                    kept = kept[(slice(None),) * d + (positions(part, around),)]
                return kept[samples]
        size = box_size(box) * len(self) * self._types[name].itemsize
        if size > self._room - sum(a.nbytes for a in self._kept.values()):
            return None
        if (name, box) not in self._asked:
            self._asked = {*self._asked, (name, box)} if len(self._asked) < _ASKED else {(name, box)}
            return None
        kept = self._kept[name, box] = self._slabs(name, np.arange(len(self)), box)
        return kept[samples]

    def _slabs(self, name: str, samples: NDArray[np.int64], box: Box) -> Array:
        """Read increasing samples, neighbours in one go."""
        out = np.empty((len(samples), *box_shape(box)), self._types[name])
        at = 0
        with self._errors():
            source = self._open()[name]
            for lo, hi in to_runs(samples):
                for there, here in pieces(box):
                    source.read_direct(out, (slice(lo, hi), *there), (slice(at, at + hi - lo), *here))
                at += hi - lo
        self.bytes_read = self.bytes_read + self._bytes(source.chunks, source.shape, samples, box, out)
        return out

    @staticmethod
    def _bytes(
        chunks: tuple[int, ...] | None, shape: tuple[int, ...], samples: NDArray[np.int64], box: Box, part: Array
    ) -> tuple[int, int]:
        """Read, whole chunks at a time, and wanted; what HDF5 keeps of chunks from call to call is not known here."""
        if chunks is None or not part.size:
            return part.nbytes, part.nbytes
        of_samples = len(set((samples // chunks[0]).tolist())) * min(chunks[0], shape[0])
        return of_samples * touched(chunks, shape[1:], box) * part.itemsize, part.nbytes

    def _open(self) -> Any:
        if self._file is None or self._pid != os.getpid():
            self._file = self._new_handle()
            self._pid = os.getpid()
        return self._file

    def _new_handle(self) -> Any:
        import h5py

        return h5py.File(self._path, "r", locking="best-effort")

    def _identity(self, xs: Any) -> tuple[Any, ...]:
        import h5py

        place = os.stat(xs.file.filename)
        return place.st_dev, place.st_ino, h5py.h5o.get_info(xs.id).addr

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with uninterrupted():
                yield
        except DataError:
            raise
        except FileNotFoundError:
            raise DataError(
                f"{self._path}: no such file; make one with `python -m lbpar.data make` or `convert`, "
                "or correct `data` in the run file."
            ) from None
        except (
            OSError,
            KeyError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as e:  # h5py raises all of them on damaged files
            text = " ".join(str(e).split())
            reason = f"it cannot be read ({text})"
            if os.path.isdir(self._path):
                reason = "it is a directory"
            elif "truncated" in text:
                reason = "it is truncated; write it again"
            elif "signature" in text:
                reason = "it is not an HDF5 file; `python -m lbpar.data convert` makes one"
            raise DataError(f"{self._path}: expected an HDF5 file, but {reason}.") from None

    def _read_header(self, split: str, x: str, y: str | None, classes: int | None) -> None:
        import h5py

        inside = self._group or split
        if not isinstance(_follow(self._file, inside, str(self._path)), h5py.Group):
            if self._group:
                groups = ", ".join(n for n, o in self._file.items() if isinstance(o, h5py.Group)) or "none"
                raise DataError(f"{self._path}: no group '{inside}'; there are {groups}.")
            inside = ""
        group = self._file[inside] if inside else self._file
        self.name = f"{self._path}:/{inside}"
        xs = self._find(group, x, split)
        ys = np.empty((*xs.shape[:1], 0)) if y is None else self._find(group, y, split)
        # A dataset's own name is another one where a link led to it.
        self._x, self._y = (f"/{inside}/{name}" if inside else f"/{name}" for name in (x, y or ""))
        check_samples(xs, ys, self.name, (x, y or "no targets"))
        for name, data in ((x, xs), *([(y, ys)] if y else [])):
            check_stored(data, f"{self.name}: '{name}'")
        self.identity = self._identity(xs)
        self._length, self.sample_shape, self.target_shape = xs.shape[0], xs.shape[1:], ys.shape[1:]
        self._labels, self.target_name = is_label(ys), self._y
        self.chunks: tuple[int, ...] | None = xs.chunks
        self.storage = f"{xs.dtype}, {f'{xs.compression} chunks {xs.chunks}' if xs.chunks else 'contiguous'}"
        self._types = {self._x: xs.dtype.newbyteorder("="), self._y: ys.dtype.newbyteorder("=")}
        self._targets = self.has_targets = y is not None
        said, self.class_names = as_classes(find_attribute("classes", ys, group), self.name) if y else (None, ())
        self.label_range = as_label_range(find_attribute("label_range", ys, group)) if self._labels else None
        if self._labels:
            self.classes = min((c for c in (said, classes) if c is not None), default=None)
        scale, mean, std = (
            as_numbers(find_attribute(name, xs, group), name, self.name, most)
            for name, most in (("scale", 1), ("mean", xs.shape[-1]), ("std", xs.shape[-1]))
        )
        if std is not None and not min(std) > 0:
            raise DataError(f"{self.name}: attribute 'std' is {std.tolist()}, expected numbers above 0.")
        self._scaled = scale is not None
        self.normalisation = Normalisation(
            scale.item() if scale is not None else 1 / 255 if xs.dtype == np.uint8 else 1.0,
            mean if mean is None else tuple(np.broadcast_to(mean, xs.shape[-1:]).tolist()),
            std if std is None else tuple(np.broadcast_to(std, xs.shape[-1:]).tolist()),
            xs.dtype.kind in "iub",
        )

    def _find(self, group: Any, name: str, split: str) -> Any:
        import h5py

        found = _follow(group, name, self.name)
        if isinstance(found, h5py.Dataset):
            return found
        names = [n for n, o in group.items() if isinstance(o, h5py.Dataset)]
        groups = [n for n, o in group.items() if isinstance(o, h5py.Group)]
        have = f"datasets {', '.join(names) or 'none'}" + (f"; groups {', '.join(groups)}" if groups else "")
        near = nearest(name, names)
        hint, of_split = f"; {near}" if near else ". ", f" for the split '{split}'" if split else ""
        raise DataError(
            f"{self.name}: no dataset '{name}'{of_split}{hint}There are {have}. "
            "Name them in the run file (data.x, data.y), or a group as in `data: {test: FILE:/GROUP}`."
        )


def _follow(group: Any, name: str, where: str) -> Any:
    """The member of a group, None if there is none; a link that leads nowhere is refused."""
    found, link = group.get(name), group.get(name, getlink=True)
    if found is None and hasattr(link, "path"):
        file = f" in the file '{link.filename}'" if hasattr(link, "filename") else ""
        raise DataError(
            f"{where}: '{name}' is a link to '{link.path}'{file}, which is missing. Put it there, or copy the data."
        )
    if found is None and link is not None:
        raise DataError(f"{where}: '{name}' is damaged. Write it again.")
    return found
