"""What a dataset is: samples and targets of one split, read in boxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.box import check_box
from lbpar.data.normalise import Normalisation
from lbpar.layout.runs import Box, whole

Array = NDArray[Any]


class Dataset(ABC):
    """Samples and targets of one split, read in boxes.

    Attributes
    ----------
    name : str
        Where the samples come from, for messages.
    sample_shape : tuple of int
        ([D], H, W, C), or (C,) for vectors. Where sizes differ, the largest extents.
    target_shape : tuple of int
        () for a label per sample, ([D], H, W) for a label per voxel, anything for real targets. As large as ``sample_shape`` where sizes differ.
    classes : int or None
        Number of classes, None for real targets.
    normalisation : Normalisation
        Done by `read`.
    bytes_read : (2,) int64 array
        From files so far, samples and targets: of the chunks that were read and decompressed, and of what was wanted of them.
    """

    name: str
    sample_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    classes: int | None
    normalisation: Normalisation
    bytes_read: NDArray[np.int64] = np.zeros(2, np.int64)

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    def read(self, samples: NDArray[np.int64], box: Box | None = None) -> Array:
        """Read a part of some samples.

        Parameters
        ----------
        samples : (n,) int64
            Global sample indices in any order; repeats and n = 0 are allowed.
        box : Box, optional
            Part of each sample; default all of it.

        Returns
        -------
        (n, *box_shape(box)) array of the dataset's floating-point type, a fresh copy
        """
        return self._read(np.asarray(samples, np.int64), self._checked(box, self.sample_shape))

    def read_targets(self, samples: NDArray[np.int64], box: Box | None = None) -> Array:
        """Read targets like `read`; labels of whole numbers, of the type that the data have, or floating-point values. The box covers ``target_shape``."""
        return self._read_targets(np.asarray(samples, np.int64), self._checked(box, self.target_shape))

    def extents(self, n: int) -> tuple[int, ...]:
        """Pixels or voxels of sample n in each dimension."""
        return self.sample_shape[:-1]

    def alike(self, samples: range) -> Iterator[tuple[int, Dataset, range]]:
        """Runs of samples of one size, as the number of the first, a dataset that has no other sizes, and their numbers there."""
        yield samples.start, self, samples

    def map(self, change: Callable[[str, Dataset], Dataset]) -> Dataset:
        """Changed; where inputs and targets have names, each by its own."""
        return change("", self)

    def at(self, epoch: int) -> Dataset:
        """As an epoch sees it."""
        return self

    def own_findings(self, samples: range, skip: bool = False) -> tuple[dict[int, Array], set[int]]:
        """What there is to know of some samples before training. Each of them is read once, if at all.

        Returns
        -------
        dict
            Statistics by sample, where the normalisation has a rule that asks for whole samples.
        set of int
            With ``skip``, samples with values that are not finite, in targets of real numbers too; these have no statistics.
        """
        return {}, set()

    def learn(self, statistics: Mapping[int, Array]) -> None:  # noqa: B027  most ask for none
        """Take statistics of samples."""

    def glance(self) -> list[Array]:
        """A few of the values that were not made from the run file, to compare."""
        return []

    def beside(self, *names: str) -> list[Array] | None:
        """What else is known of each sample, by name, such as ``affine``; None if one of them is missing."""
        return None

    def around(self, n: int) -> tuple[Dataset, int, tuple[int, ...]]:
        """What sample n is cut out of: a dataset, the sample's number there, and where it begins in each spatial dimension."""
        return self, n, (0,) * (len(self.sample_shape) - 1)

    def part(self, source: str) -> Dataset:
        """What holds one of the network's inputs, or a target: itself, where it has one of each."""
        return self

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Release files and memory; reading again reopens."""

    @abstractmethod
    def _read(self, samples: NDArray[np.int64], box: Box) -> Array: ...

    @abstractmethod
    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> Array: ...

    def _checked(self, box: Box | None, shape: tuple[int, ...]) -> Box:
        box = whole(shape) if box is None else box
        check_box(box, shape, self.name)
        return box
