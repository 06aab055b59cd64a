"""Patches of large samples: drawn at random for training, and side by side for inference. The same on every grid."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.config.data import Patches
from lbpar.data.dataset import Dataset
from lbpar.data.targets import alike_targets, own_range
from lbpar.layout.runs import Box
from lbpar.random import bits, fold, integers, uniform

Array = NDArray[Any]
_PLACES, _CHOICE, _PLACE, _ORIGIN = 21, 22, 23, 24
MOST = 512
"""Places of foreground that are kept of each sample."""


class Cut(Dataset):
    """Patches of one size, each of a sample, from an origin."""

    def __init__(self, dataset: Dataset, patch: Sequence[int]) -> None:
        self.name, self.classes, self.normalisation = dataset.name, dataset.classes, dataset.normalisation
        space = dataset.sample_shape[:-1]
        self._of, self._patch = dataset, tuple(patch)
        self.sample_shape = (*self._patch, dataset.sample_shape[-1])
        self.target_shape = dataset.target_shape
        if self.target_shape[: len(space)] == space:
            self.target_shape = (*self._patch, *self.target_shape[len(space) :])

    def place(self, n: int) -> tuple[int, tuple[int, ...]]:
        """Sample and origin of patch n."""
        raise NotImplementedError

    def around(self, n: int) -> tuple[Dataset, int, tuple[int, ...]]:
        """The whole sample, and where the patch lies."""
        return self._of, *self.place(n)

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
        room = np.array(self._of.extents(sample)) - self._patch
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
    """Patches of given origins of each sample, one sample after the other.

    Parameters
    ----------
    dataset : Dataset
    patch : sequence of int
        Spatial extents.
    origins : sequence of sequences of tuples
        Of each sample.
    """

    def __init__(self, dataset: Dataset, patch: Sequence[int], origins: Sequence[Sequence[tuple[int, ...]]]) -> None:
        super().__init__(dataset, patch)
        self._origins, self._ends = origins, list(accumulate(map(len, origins)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, n: int) -> tuple[int, tuple[int, ...]]:
        sample, k = self.which(n)
        return sample, self._origins[sample][k]

    def which(self, n: int) -> tuple[int, int]:
        """The sample of patch n, and which of its patches that is."""
        sample = bisect_right(self._ends, n)
        return sample, n - self._ends[sample] + len(self._origins[sample])


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
    found: dict[int, Array] = {}
    for start, one, there in dataset.alike(own_range(dataset, share)):
        found |= {start + n - there.start: places for n, places in _places(one, there, ignore).items()}
    return found


def _places(dataset: Dataset, samples: range, ignore: int | None) -> dict[int, Array]:
    """The same of samples of one size."""
    out: dict[int, tuple[Array, Array]] = {}
    space = dataset.target_shape
    for at, part, offset in alike_targets(dataset, samples):
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
