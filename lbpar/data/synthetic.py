"""Random samples and targets, the same for every process grid: values depend on the seed and the global index only."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lbpar.data.dataset import Dataset
from lbpar.data.normalise import Normalisation
from lbpar.layout.runs import Box, box_shape, box_size, index_parts
from lbpar.random import fold, integers, outer_sum, uniform

Array = NDArray[Any]
_SAMPLES, _TARGETS = 1, 2
_PIECE = 1 << 16  # elements drawn at a time


class SyntheticDataset(Dataset):
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
        self._kept = lru_cache(distinct)(self._one)  # boxes of more than one kind (last batches) push old ones out

    def __len__(self) -> int:
        return self._length

    def close(self) -> None:
        self._kept.cache_clear()

    def _read(self, samples: NDArray[np.int64], box: Box) -> Array:
        out = np.empty((len(samples), *box_shape(box)), self.dtype)
        one = self._kept if box_size(box) * out.itemsize * self._distinct <= self._room else self._one
        for row, n in zip(out, (samples % self._distinct).tolist(), strict=True):
            row[...] = one(n, box)
        return out

    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> Array:
        key, classes = fold(self._seed, _TARGETS), self.classes
        draw = partial(uniform, key) if classes is None else partial(integers, key, below=classes)
        out = np.empty((len(samples), *box_shape(box)), self.dtype if classes is None else np.int64)
        return self._fill(out, samples, box, self.target_shape, draw)

    def _one(self, n: int, box: Box) -> Array:
        """Sample ``n``, or a part of it."""
        key = fold(self._seed, _SAMPLES)
        out = np.empty((1, *box_shape(box)), self.dtype)
        return self._fill(out, np.array([n]), box, self.sample_shape, lambda i: (uniform(key, i) - 0.5) * sqrt(12))[0]

    def _fill(
        self, out: Array, samples: NDArray[np.int64], box: Box, shape: tuple[int, ...], draw: Callable[[Array], Array]
    ) -> Array:
        """Fill the boxes of samples by ``draw(global indices)``, a piece at a time: draws need several times their result's memory."""
        first = (np.asarray(samples, np.int64) % self._distinct) * prod(shape)
        if not box:
            out[...] = draw(first)
            return out
        rows, *rest = index_parts(box, shape)
        plane = outer_sum(rest)
        step = max(1, _PIECE // max(1, plane.size))
        for row, start in zip(out, first, strict=True):
            for i in range(0, len(rows), step):
                row[i : i + step] = draw(start + np.add.outer(rows[i : i + step], plane))
        return out
