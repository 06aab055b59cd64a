"""Random samples and targets, the same for every process grid: values depend on the seed and the global index only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial, reduce
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lbpar.data.box import check_box
from lbpar.data.normalise import Normalisation
from lbpar.layout.runs import Box, box_shape, index_parts, whole
from lbpar.random import fold, integers, uniform

Array = NDArray[Any]
_SAMPLES, _TARGETS = 1, 2
_PIECE = 1 << 16  # elements drawn at a time


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
        key, classes = fold(self._seed, _TARGETS), self.classes
        draw = partial(uniform, key) if classes is None else partial(integers, key, below=classes)
        out = np.empty((len(samples), *box_shape(box)), self.dtype if classes is None else np.int64)
        return self._fill(out, samples, box, self.target_shape, draw)

    def close(self) -> None:
        """Forget what was kept."""
        self._kept.clear()

    def _one(self, n: int, box: Box) -> Array:
        kept = self._kept.get((n, box))
        if kept is not None:
            return kept
        key = fold(self._seed, _SAMPLES)
        values = np.empty((1, *box_shape(box)), self.dtype)
        (values,) = self._fill(
            values, np.array([n]), box, self.sample_shape, lambda where: (uniform(key, where) - 0.5) * sqrt(12)
        )
        if values.nbytes * self._distinct <= self._room:
            self._kept[n, box] = values
            while len(self._kept) > self._distinct:  # boxes of more than one kind (last batches) push old ones out
                self._kept.popitem(last=False)
        return values

    def _fill(
        self, out: Array, samples: NDArray[np.int64], box: Box, shape: tuple[int, ...], draw: Callable[[Array], Array]
    ) -> Array:
        """Fill the boxes of samples by ``draw(global indices)``, a piece at a time: draws need several times their result's memory."""
        first = (np.asarray(samples, np.int64) % self._distinct) * prod(shape)
        if not box:
            out[...] = draw(first)
            return out
        rows, *rest = index_parts(box, shape)
        plane = reduce(np.add.outer, rest, np.zeros((), np.int64))
        step = max(1, _PIECE // max(1, plane.size))
        for row, start in zip(out, first, strict=True):
            for i in range(0, len(rows), step):
                row[i : i + step] = draw(start + np.add.outer(rows[i : i + step], plane))
        return out
