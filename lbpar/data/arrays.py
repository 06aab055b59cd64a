"""Samples that a caller has in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lbpar.data.dataset import Dataset
from lbpar.data.normalise import Normalisation
from lbpar.errors import DataError
from lbpar.layout.runs import Box, indices

Array = NDArray[Any]


class ArrayDataset(Dataset):
    """Samples without targets, read like those of a file.

    Parameters
    ----------
    x : (n, [D], H, W, C) array
    normalisation : Normalisation
        Done by `read`.
    dtype : dtype
        What reading returns.
    """

    def __init__(self, x: Array, normalisation: Normalisation, dtype: DTypeLike) -> None:
        self._x, self.normalisation, self._dtype = x, normalisation, np.dtype(dtype)
        self.name = str(x.filename) if isinstance(x, np.memmap) else "samples in memory"
        self.classes = None
        self.sample_shape, self.target_shape = x.shape[1:], ()

    def __len__(self) -> int:
        return len(self._x)

    def _read(self, samples: NDArray[np.int64], box: Box) -> Array:
        part = self._x[np.ix_(samples, *map(indices, box))]
        ruled = self.normalisation.rule is not None and part.size
        own = np.array([self.normalisation.statistics(self._x[i]) for i in samples.tolist()]) if ruled else None
        return self.normalisation.checked(part, samples, self.name, self._dtype, indices(box[-1]), own)

    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> Array:
        raise DataError("samples in memory have no targets; they can be predicted, not evaluated.")
