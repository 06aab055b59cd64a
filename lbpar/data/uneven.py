"""Files whose samples differ in size from file to file, for patches: a file per volume, as scanners make them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.dataset import Dataset
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.many_files import found_files
from lbpar.data.normalise import Normalisation
from lbpar.errors import DataError
from lbpar.layout.runs import Box

Array = NDArray[Any]
_OPEN = 64
"""Files that stay open."""


class UnevenFiles(Dataset):
    """The samples of several files one after the other, each file's of a size of its own.

    What is read of a sample must lie inside it (`Dataset.extents`).

    Parameters
    ----------
    files : tuple of str
        Paths, or patterns as ``vol/*.h5``.
    split : str
        Group to use in each file that has it.
    options
        As for `Hdf5Dataset`.

    Raises
    ------
    DataError
        What `Hdf5Dataset` refuses; files that differ in more than the size of their samples.
    """

    def __init__(self, files: tuple[str, ...], split: str = "train", **options: Any) -> None:
        found, shown = found_files(files, f"data.{split}")
        cache = options.pop("cache", 0) // len(found)
        self.files = [Hdf5Dataset(f, split, cache=cache, **options) for f in found]
        first = self.files[0]
        for one in self.files[1:]:
            for what, got, want in zip(_FACTS, _facts(one), _facts(first), strict=True):
                if got != want:
                    raise DataError(
                        f"{one.name}: {what}: got {got}, expected {want} as in {first.name}; files of one data set differ in the size of their "
                        "samples only."
                    )
        self._used: list[Hdf5Dataset] = []  # the last first
        self._ends = list(accumulate(map(len, self.files)))
        self.name, self.has_targets, self.target_name = f"{shown} ({len(found)} files)", first.has_targets, ""
        self.classes, self.class_names = first.classes, first.class_names
        sizes = np.max([one.sample_shape[:-1] for one in self.files], axis=0).tolist()
        self.sample_shape = (*sizes, first.sample_shape[-1])
        self.target_shape = (*sizes, *first.target_shape[len(sizes) :]) if _by_place(first) else first.target_shape
        self.identity = tuple(one.identity for one in self.files)

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def normalisation(self) -> Normalisation:  # type: ignore[override]
        """Of all files."""
        return self.files[0].normalisation

    @normalisation.setter
    def normalisation(self, value: Normalisation) -> None:
        for one in self.files:
            one.normalisation = value

    @property
    def bytes_read(self) -> NDArray[np.int64]:  # type: ignore[override]
        """Of all files."""
        return np.sum([one.bytes_read for one in self.files], axis=0)

    def normalise_like(self, other: Normalisation) -> None:
        """Take mean and standard deviation of other data."""
        for one in self.files:
            one.normalise_like(other)

    def extents(self, n: int) -> tuple[int, ...]:
        return self._file(n)[0].extents(0)

    def alike(self, samples: range) -> Iterator[tuple[int, Dataset, range]]:
        for one, end in zip(self.files, self._ends, strict=True):
            begin = end - len(one)
            some = range(max(samples.start, begin), min(samples.stop, end))
            if some:
                yield some.start, one, range(some.start - begin, some.stop - begin)

    def own_findings(self, samples: range, skip: bool = False) -> tuple[dict[int, Array], set[int]]:
        statistics: dict[int, Array] = {}
        spoilt: set[int] = set()
        for start, one, there in self.alike(samples):
            known, bad = one.own_findings(there, skip)
            statistics |= {start + n - there.start: found for n, found in known.items()}
            spoilt |= {start + n - there.start for n in bad}
        return statistics, spoilt

    def learn(self, statistics: Mapping[int, Array]) -> None:
        for n, found in statistics.items():
            one, own = self._file(n)
            one.learn({own: found})

    def glance(self) -> list[Array]:
        return [part for one in self.files for part in one.glance(1)]

    def close(self) -> None:
        """Close all files."""
        for one in self.files:
            one.close()

    def _file(self, n: int) -> tuple[Hdf5Dataset, int]:
        """The file that sample n is in, and its number there."""
        at = bisect_right(self._ends, n)
        one = self.files[at]
        return one, n - self._ends[at] + len(one)

    def _read(self, samples: NDArray[np.int64], box: Box) -> Array:
        return self._each("read", samples, box)

    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> Array:
        return self._each("read_targets", samples, box)

    def _each(self, read: str, samples: NDArray[np.int64], box: Box) -> Array:
        parts: list[Array] = []
        for n in samples.tolist():
            one, own = self._file(n)
            parts.append(getattr(one, read)(np.array([own]), box))
            self._used = [one, *(other for other in self._used if other is not one)]
            for idle in self._used[_OPEN:]:
                idle.close()
            self._used = self._used[:_OPEN]
        return np.concatenate(parts or [getattr(self.files[0], read)(samples, box)])


_FACTS = ("channels", "type", "type of targets", "shape of targets but for space", "classes", "scale, mean and std")


def _by_place(data: Hdf5Dataset) -> bool:
    """Whether there is a target for each pixel or voxel."""
    space = data.sample_shape[:-1]
    return bool(space) and data.target_shape[: len(space)] == space


def _facts(data: Hdf5Dataset) -> tuple[Any, ...]:
    """What must be alike, in the order of `_FACTS`."""
    rest = data.target_shape[len(data.sample_shape) - 1 :] if _by_place(data) else data.target_shape
    types = (data.stored_type(False), data.stored_type(True))
    dims = (len(data.sample_shape) - 1, data.sample_shape[-1])
    return dims, *types, rest, data.classes, data.normalisation
