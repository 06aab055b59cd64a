"""Some samples of a dataset, as a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.dataset import Dataset
from lbpar.errors import DataError
from lbpar.layout.runs import Box


class Subset(Dataset):
    """The samples of the given ``numbers`` of the ``whole``, in that order."""

    def __init__(self, dataset: Dataset, samples: Sequence[int]) -> None:
        bad = next((i for i in samples if not 0 <= i < len(dataset)), None)
        if bad is not None:
            raise DataError(f"{dataset.name}: got the sample {bad}, expected 0 to {len(dataset) - 1}.")
        self.whole, self.numbers = dataset, np.asarray(samples, np.int64)
        self.name, self.classes, self.normalisation = dataset.name, dataset.classes, dataset.normalisation
        self.sample_shape, self.target_shape = dataset.sample_shape, dataset.target_shape

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def bytes_read(self) -> NDArray[np.int64]:  # type: ignore[override]
        """Of the whole."""
        return self.whole.bytes_read

    def extents(self, n: int) -> tuple[int, ...]:
        """Of the sample of the whole."""
        return self.whole.extents(int(self.numbers[n]))

    def alike(self, samples: range) -> Iterator[tuple[int, Dataset, range]]:
        """One by one, for they may lie anywhere."""
        for i in samples:
            n = int(self.numbers[i])
            for _, one, there in self.whole.alike(range(n, n + 1)):
                yield i, one, there

    def close(self) -> None:
        """Close the whole."""
        self.whole.close()

    def _read(self, samples: NDArray[np.int64], box: Box) -> NDArray[Any]:
        return self.whole.read(self.numbers[samples], box)

    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> NDArray[Any]:
        return self.whole.read_targets(self.numbers[samples], box)
