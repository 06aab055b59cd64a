"""Patches of large samples: drawn at random for training, and side by side for inference. The same on every grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.config.data import Patches
from lbpar.data.dataset import Dataset
from lbpar.data.targets import target_pieces
from lbpar.errors import DataError
from lbpar.layout.runs import Box
from lbpar.random import bits, fold, integers, uniform

Array = NDArray[Any]
_PLACES, _CHOICE, _PLACE, _ORIGIN = 21, 22, 23, 24
MOST = 512
"""Places of foreground that are kept of each sample."""


class Cut(Dataset):
    """Patches of one size, each of a sample, from an origin."""

    def __init__(self, dataset: Dataset, patch: Sequence[int]) -> None:
        self._of, self._patch = dataset, tuple(patch)
        self.name, self.classes, self.normalisation = dataset.name, dataset.classes, dataset.normalisation
        space = dataset.sample_shape[:-1]
        self.sample_shape = (*self._patch, dataset.sample_shape[-1])
        self.target_shape = (*self._patch, *dataset.target_shape[len(space) :])

    def place(self, n: int) -> tuple[int, tuple[int, ...]]:
        """Sample and origin of patch n."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the originals."""
        self._of.close()

    def _read(self, samples: NDArray[np.int64], box: Box) -> Array:
        return self._moved(self._of.read, samples, box)

    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> Array:
        return self._moved(self._of.read_targets, samples, box)

    def _moved(self, read: Any, samples: NDArray[np.int64], box: Box) -> Array:
        parts = []
        for n in samples.tolist():
            sample, origin = self.place(n)
            moved = (tuple((lo + o, hi + o) for lo, hi in runs) for runs, o in zip(box, origin, strict=False))
            parts.append(read(np.array([sample]), (*moved, *box[len(origin) :])))
        return np.concatenate(parts) if parts else np.asarray(read(samples, box))


class Patched(Cut):
    """Random patches: ``per_sample`` of each sample and epoch, a part of them around a place that is not background.

    Parameters
    ----------
    dataset : Dataset
        Samples that are at least as large as a patch.
    patch : sequence of int
        Its spatial extents.
    options : Patches
    places : mapping
        Of each sample, places that are not background (`own_places`).
    seed, epoch : int
    """

    def __init__(
        self,
        dataset: Dataset,
        patch: Sequence[int],
        options: Patches,
        places: Mapping[int, Array],
        seed: int,
        epoch: int = 0,
    ) -> None:
        super().__init__(dataset, patch)
        self._options, self._places, self._seed = options, places, seed
        self._keys = [fold(seed, salt, epoch) for salt in (_CHOICE, _PLACE, _ORIGIN)]

    def at(self, epoch: int) -> Patched:
        """As an epoch sees it."""
        return Patched(self._of, self._patch, self._options, self._places, self._seed, epoch)

    def __len__(self) -> int:
        return len(self._of) * self._options.per_sample

    def place(self, n: int) -> tuple[int, tuple[int, ...]]:
        sample, (choice, place, origin) = n // self._options.per_sample, self._keys
        room = np.array(self._of.sample_shape[: len(self._patch)]) - self._patch
        found = self._places.get(sample, ())
        if len(found) and uniform(choice, np.array([n]))[0] < self._options.foreground:
            centre = found[int(integers(place, np.array([n]), len(found))[0])]
            first = np.clip(centre - np.array(self._patch) // 2, 0, room)
        else:
            first = np.array(
                [int(integers(origin, np.array([4 * n + d]), r + 1)[0]) for d, r in enumerate(room.tolist())]
            )
        return sample, tuple(first.tolist())


class Windows(Cut):
    """Patches of the same origins of each sample, one after the other."""

    def __init__(self, dataset: Dataset, patch: Sequence[int], origins: Sequence[tuple[int, ...]]) -> None:
        super().__init__(dataset, patch)
        self._origins = origins

    def __len__(self) -> int:
        return len(self._of) * len(self._origins)

    def place(self, n: int) -> tuple[int, tuple[int, ...]]:
        return n // len(self._origins), self._origins[n % len(self._origins)]


def own_places(dataset: Dataset, share: tuple[int, int], ignore: int | None = None) -> dict[int, Array]:
    """Places of a share of the samples whose label is neither 0 nor ignored: `MOST` of each at most, drawn at random.

    Parameters
    ----------
    dataset : Dataset
        With a label per pixel or voxel.
    share : (int, int)
        (k, n): the k-th of n parts.
    ignore : int, optional
    """
    out: dict[int, tuple[Array, Array]] = {}
    space = dataset.target_shape
    for at, part, offset in _pieces(dataset, share):
        for sample, labels in enumerate(part, at):
            some = labels != 0 if ignore is None else (labels != 0) & (labels != ignore)
            flat = offset * prod(space[1:]) + np.flatnonzero(some)
            keys, known = out.get(sample, (np.empty(0, np.uint64), np.empty(0, np.int64)))
            keys, known = np.concatenate([keys, bits(fold(sample, _PLACES), flat)]), np.concatenate([known, flat])
            least = np.argsort(keys, kind="stable")[:MOST]
            out[sample] = keys[least], known[least]
    return {
        s: np.stack(np.unravel_index(flat, space), -1).astype(np.int32) for s, (_, flat) in out.items() if len(flat)
    }


def _pieces(dataset: Dataset, share: tuple[int, int]) -> Any:
    """First sample, labels, and the plane at which these begin."""
    last, offset = -1, 0
    for at, part in target_pieces(dataset, share):
        offset = offset if at == last and part.shape[1] < dataset.target_shape[0] else 0
        yield at, part, offset
        last, offset = at, offset + part.shape[1]


def check_patches(dataset: Dataset, input_shape: Sequence[int], outputs: Sequence[int], labels: bool) -> None:
    """Refuse samples of which the network's input cannot be a patch, or without a target per pixel or voxel."""
    space, patch = dataset.sample_shape[:-1], tuple(input_shape[:-1])
    wanted = space if labels else (*space, outputs[-1])
    if tuple(outputs[:-1]) != patch:
        raise DataError(
            f"data.patches: the network makes {tuple(outputs)} of {tuple(input_shape)}, expected an output per pixel or voxel."
        )
    fits = len(space) == len(patch) and dataset.sample_shape[-1] == input_shape[-1]
    if not fits or any(e < p for e, p in zip(space, patch, strict=False)):
        raise DataError(
            f"{dataset.name}: samples have the shape {dataset.sample_shape}, expected at least {tuple(input_shape)}, the network's input, "
            "of which patches are cut; pad them (`lbpar data convert --pad`), or take smaller patches."
        )
    if dataset.target_shape != wanted:
        raise DataError(
            f"{dataset.name}: targets have the shape {dataset.target_shape} per sample, expected {wanted} for patches."
        )
