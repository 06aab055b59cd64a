"""Samples with several inputs, or several targets, each by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.dataset import Dataset
from lbpar.data.normalise import Normalisations
from lbpar.errors import DataError
from lbpar.layout.runs import Box


class NamedDataset(Dataset):
    """A dataset for each input and each target of a network; the first input with pixels or voxels, else the first, says what a sample is.

    Parameters
    ----------
    inputs : mapping of str to Dataset
        By the names of the network's inputs.
    targets : mapping of str to Dataset
        By the names of the network's targets: ``target/NAME``, or ``target``. Their samples are those of the first input.

    Raises
    ------
    DataError
        Their numbers of samples differ.
    """

    def __init__(self, inputs: Mapping[str, Dataset], targets: Mapping[str, Dataset]) -> None:
        self.inputs, self.targets = dict(inputs), dict(targets)
        self.main = first = next(
            (d for d in self.inputs.values() if len(d.sample_shape) > 1), next(iter(self.inputs.values()))
        )
        self.name, self.sample_shape = first.name, first.sample_shape
        target = next(iter(self.targets.values()), first)
        self.target_shape, self.classes = target.target_shape, target.classes
        for name, data in self.parts.items():
            if len(data) != len(first):
                raise DataError(
                    f"{data.name}: '{name}' has {len(data)} samples, expected {len(first)} as {first.name}; they belong together."
                )

    @property
    def parts(self) -> dict[str, Dataset]:
        """All of them."""
        return self.inputs | self.targets

    @property
    def normalisation(self) -> Normalisations:  # type: ignore[override]
        """Of each input."""
        return Normalisations({name: one.normalisation for name, one in self.inputs.items()})

    def part(self, source: str) -> Dataset:
        return self.parts[source]

    def map(self, change: Callable[[str, Dataset], Dataset]) -> NamedDataset:
        inputs, targets = ({n: change(n, d) for n, d in some.items()} for some in (self.inputs, self.targets))
        return NamedDataset(inputs, targets)

    def extents(self, n: int) -> tuple[int, ...]:
        return self.main.extents(n)

    def at(self, epoch: int) -> NamedDataset:
        return self.map(lambda _, one: one.at(epoch))

    @property
    def bytes_read(self) -> NDArray[np.int64]:  # type: ignore[override]
        """Of all."""
        return np.sum([one.bytes_read for one in self.parts.values()], axis=0)

    def close(self) -> None:
        """Close all."""
        for one in self.parts.values():
            one.close()

    def __len__(self) -> int:
        return len(self.main)

    def _read(self, samples: NDArray[np.int64], box: Box) -> NDArray[Any]:
        return self.main.read(samples, box)

    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> NDArray[Any]:
        return next(iter(self.targets.values())).read_targets(samples, box)


def each(dataset: Dataset | None) -> dict[str, Dataset]:
    """Those that samples are read from, by the names of the inputs; of a single one under an empty name."""
    return {} if dataset is None else dataset.inputs if isinstance(dataset, NamedDataset) else {"": dataset}
