"""The order of samples: a permutation per epoch that depends on the seed and the epoch only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lbpar.random import bits, fold

_ORDER = 3


def epoch_order(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """Return a random permutation of ``range(n)``; the same on every machine, rank and NumPy version.

    Sorting by independent 64-bit keys gives a uniform permutation (ties, at n²/2⁶⁵, keep their order).
    """
    keys = bits(fold(seed, _ORDER, epoch), np.arange(n, dtype=np.int64))
    return np.argsort(keys, kind="stable").astype(np.int64)


@dataclass(frozen=True)
class Sampler:
    """Batches of global sample indices, epoch by epoch.

    Parameters
    ----------
    length : int
        Number of samples.
    batch : int
        Samples per batch, over all processes. More than ``length`` gives one incomplete batch per epoch.
    seed : int
        Fixes the order.
    shuffle : bool
        A new order in every epoch; otherwise 0, 1, 2, ...
    drop_last : bool
        Leave out an incomplete last batch (unless it is the only one, else an epoch would be empty).
    """

    length: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        full = self.length // self.batch
        return full if (self.drop_last and full) else -(-self.length // self.batch)

    @property
    def last(self) -> int:
        """Samples of the last batch of an epoch."""
        return min(self.batch, self.length - (self.steps_per_epoch - 1) * self.batch)

    def sizes(self) -> list[int]:
        """Number of samples of each batch of an epoch."""
        return [self.batch] * (self.steps_per_epoch - 1) + [self.last]

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of an epoch, all samples."""
        return epoch_order(self.seed, epoch, self.length) if self.shuffle else np.arange(self.length, dtype=np.int64)

    def batches(self, epoch: int, start: int = 0) -> Iterator[NDArray[np.int64]]:
        """Yield the batches of an epoch from batch number ``start`` on: where a resumed run goes on."""
        order = self.order(epoch)
        for step in range(start, self.steps_per_epoch):
            yield order[step * self.batch : (step + 1) * self.batch]

    def position(self, step: int) -> tuple[int, int]:
        """Return (epoch, batch in the epoch) of a step counted from the start of training."""
        return divmod(step, max(1, self.steps_per_epoch))
