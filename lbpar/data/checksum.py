"""Do ranks read the same data? Cheap facts and checksums to compare, whatever the size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from lbpar.data.dataset import Dataset
from lbpar.data.named import NamedDataset

SAMPLED = 1 << 16
"""Elements of an array that count."""


def checksum(arrays: Iterable[NDArray[Any]]) -> str:
    """Of shapes, types and elements spread over each array."""
    state = hashlib.sha256()
    for array in arrays:
        state.update(f"{array.shape} {array.dtype}".encode())
        step = -(-array.size // SAMPLED) | 1  # odd, so that it does not keep to one column
        state.update(array.flat[::step].tobytes())
    return state.hexdigest()


def dataset_facts(name: str, dataset: Dataset) -> dict[str, object]:
    """What must be the same on all ranks, by name.

    Parameters
    ----------
    name : str
        Field of the run file.
    dataset : Dataset
    """
    if isinstance(dataset, NamedDataset):
        return {k: v for part, one in dataset.parts.items() for k, v in dataset_facts(f"{name}, {part}", one).items()}
    facts: dict[str, object] = {
        f"{name}: number of samples": len(dataset),
        f"{name}: shape of a sample": dataset.sample_shape,
        f"{name}: shape of a target": dataset.target_shape,
        f"{name}: classes": dataset.classes,
        f"{name}: scale, mean and std": dataset.normalisation,
    }
    facts[f"{name}: content"] = checksum(dataset.glance())
    return facts
