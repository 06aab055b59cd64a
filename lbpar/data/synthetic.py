"""Random samples and targets, the same for every process grid: values depend on the seed and the global index only."""

from __future__ import annotations

from collections import OrderedDict
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lbpar.data.box import check_box
from lbpar.data.normalise import Normalisation
from lbpar.layout.runs import Box, box_shape, flat_index, whole
from lbpar.random import fold, integers, uniform

Array = NDArray[Any]
_SAMPLES, _TARGETS = 1, 2


class SyntheticDataset:
    """Noise with mean 0 and variance 1, with random targets.

    Only ``distinct`` different samples exist, repeated over and over: making noise must not dominate a timing run, and
    a network can learn them by heart.

    Parameters
    ----------
    samples : int
        Length of the dataset.
    sample_shape, target_shape : tuple of int
        Shape of one sample ([D], H, W, C) and one target.
    classes : int or None
        Labels lie in [0, classes); None makes real targets in [0, 1).
    dtype : dtype
        float32 or float64.
    seed : int
        Another seed makes other data.
    distinct : int
        Number of different samples.
    cache : int, bytes
        How much of what was made to keep.
    """

    def __init__(
        self,
        samples: int,
        sample_shape: tuple[int, ...],
        target_shape: tuple[int, ...] = (),
        classes: int | None = 10,
        *,
        dtype: DTypeLike = np.float32,
        seed: int = 0,
        distinct: int = 32,
        cache: int = 0,
    ) -> None:
        self.name = "synthetic"
        self.sample_shape, self.target_shape, self.classes = sample_shape, target_shape, classes
        self.dtype = np.dtype(dtype)
        self.normalisation = Normalisation()
        self._length, self._seed, self._distinct = samples, seed, distinct
        self._room = cache
        self._kept: OrderedDict[tuple[int, Box], Array] = OrderedDict()

    def __len__(self) -> int:
        return self._length

    def read(self, samples: NDArray[np.int64], box: Box | None = None) -> Array:
        """See `lbpar.data.dataset.Dataset.read`."""
        box = whole(self.sample_shape) if box is None else box
        check_box(box, self.sample_shape, self.name)
        out = np.empty((len(samples), *box_shape(box)), self.dtype)
        for row, n in zip(out, np.asarray(samples) % self._distinct, strict=True):
            row[...] = self._one(int(n), box)
        return out

    def read_targets(self, samples: NDArray[np.int64], box: Box | None = None) -> Array:
        """See `lbpar.data.dataset.Dataset.read_targets`."""
        box = whole(self.target_shape) if box is None else box
        check_box(box, self.target_shape, self.name)
        key = fold(self._seed, _TARGETS)
        first = (np.asarray(samples, dtype=np.int64) % self._distinct) * prod(self.target_shape)
        where = first.reshape(-1, *(1,) * len(box)) + flat_index(box, self.target_shape)
        if self.classes is not None:
            return integers(key, where, self.classes)
        return uniform(key, where).astype(self.dtype)

    def close(self) -> None:
        """Forget what was kept."""
        self._kept.clear()

    def _one(self, n: int, box: Box) -> Array:
        kept = self._kept.get((n, box))
        if kept is not None:
            return kept
        where = n * prod(self.sample_shape) + flat_index(box, self.sample_shape)
        values = ((uniform(fold(self._seed, _SAMPLES), where) - 0.5) * sqrt(12)).astype(self.dtype)
        if values.nbytes * self._distinct <= self._room:
            self._kept[n, box] = values
            while len(self._kept) > self._distinct:  # boxes of more than one kind (last batches) push old ones out
                self._kept.popitem(last=False)
        return values
