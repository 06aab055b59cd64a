"""What all random changes share: numbers drawn by seed, epoch and sample, and reading only what a block needs."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.config.augment import Augment, Change, Drawn
from lbpar.data.dataset import Dataset
from lbpar.layout.runs import Box, Runs, indices
from lbpar.random import fold, uniform

Array = NDArray[Any]
_MOST = 8
"""Numbers drawn of a sample for one change."""


def target_space(dataset: Dataset) -> tuple[int, ...]:
    """Extents of pixels or voxels of a target: of a label for each, or of real numbers for each and channel. A vector, which may happen to be as
    long as a line of voxels, has none."""
    return dataset.target_shape if dataset.classes is not None else dataset.target_shape[:-1]


class Changed(Dataset):
    """A dataset whose samples are changed at random, as one epoch sees them.

    Parameters
    ----------
    dataset : Dataset
        The originals.
    augment : Augment
        What to do.
    seed, epoch : int
        With the sample's global index they fix everything.

    Attributes
    ----------
    targets_move : bool
        Whether there is a label, or numbers, for each pixel or voxel.
    """

    def __init__(self, dataset: Dataset, augment: Augment, seed: int, epoch: int) -> None:
        self._source, self._augment, self._seed, self._epoch = dataset, augment, seed, epoch
        self.name, self.classes, self.normalisation = dataset.name, dataset.classes, dataset.normalisation
        self.sample_shape, self.target_shape = dataset.sample_shape, dataset.target_shape
        self._space = space = self.sample_shape[:-1]
        self.targets_move = bool(space) and target_space(self) == space

    def __len__(self) -> int:
        return len(self._source)

    def close(self) -> None:
        """Close the originals."""
        self._source.close()

    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> Array:
        return self._source.read_targets(samples, box)

    def _key(self, kind: str) -> int:
        return fold(self._seed, zlib.crc32(f"augment.{kind}".encode()), self._epoch)

    def _chosen(self, kind: str, n: int) -> bool:
        """Whether sample n is changed so."""
        change: Change | None = getattr(self._augment, kind)
        return change is not None and bool(uniform(fold(self._key(kind), 0), [n])[0] < change.probability)

    def _drawn(self, kind: str, n: int, count: int = 1) -> list[float]:
        """Numbers for sample n from ``low`` to ``high``; none if it is not changed so."""
        if not self._chosen(kind, n):
            return []
        change: Drawn = getattr(self._augment, kind)
        u = uniform(fold(self._key(kind), 1), n * _MOST + np.arange(count))
        if change.ratio:
            return (change.low * (change.high / change.low) ** u).tolist()  # type: ignore[no-any-return]
        return (change.low + (change.high - change.low) * u).tolist()  # type: ignore[no-any-return]


class ByBlock(Changed):
    """Changes that make one block at a time, of a larger one of the original."""

    def _read(self, samples: NDArray[np.int64], box: Box) -> Array:
        return self._blocks(samples, box, False)

    def _blocks(self, samples: NDArray[np.int64], box: Box, targets: bool) -> Array:
        dims, read = len(self._space), self._source.read_targets if targets else self._source.read
        spans = [(runs[0][0], runs[-1][1]) if runs else (0, 0) for runs in box[:dims]]
        if not len(samples) or any(hi <= lo for lo, hi in spans):
            return np.asarray(read(samples, box))
        picks = np.ix_(*(indices(runs) - lo for runs, (lo, _) in zip(box, spans, strict=False)))
        blocks = (self._block(n, spans, box[dims:], targets) for n in samples.tolist())
        return np.stack([block[picks] if any(len(runs) > 1 for runs in box[:dims]) else block for block in blocks])

    @abstractmethod
    def _block(self, n: int, spans: list[tuple[int, int]], rest: Box, targets: bool) -> Array:
        """Sample n, or its target, from ``lo`` to ``hi`` in each spatial dimension, and what else is asked for."""

    def _original(self, n: int, spans: list[tuple[int, int]], rest: Box, targets: bool = False) -> Array:
        read = self._source.read_targets if targets else self._source.read
        return np.asarray(read(np.array([n]), (*(one(s) for s in spans), *rest))[0])


def one(span: tuple[int, int]) -> Runs:
    """A span as the runs of a box."""
    return (span,)
