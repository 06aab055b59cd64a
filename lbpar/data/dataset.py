"""What a dataset is: samples and targets of one split, read in boxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
        ([D], H, W, C), or (C,) for vectors.
    target_shape : tuple of int
        () for a label per sample, ([D], H, W) for a label per voxel, anything for real targets.
    classes : int or None
        Number of classes, None for real targets.
    normalisation : Normalisation
        Done by `read`.
    """

    name: str
    sample_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    classes: int | None
    normalisation: Normalisation

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
        """Read targets like `read`; int64 labels or floating-point values. The box covers ``target_shape``."""
        return self._read_targets(np.asarray(samples, np.int64), self._checked(box, self.target_shape))

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
