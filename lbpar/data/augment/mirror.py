"""Random flips, and crops that are shifted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.config.augment import Augment
from lbpar.data.augment.changed import Changed
from lbpar.data.dataset import Dataset
from lbpar.layout.runs import Box, Runs, indices
from lbpar.random import bits, fold, integers

Array = NDArray[Any]
_FLIP, _SHIFT = 4, 5
_DIMS = 8  # random numbers reserved per sample


class Mirrored(Changed):
    """Samples flipped and shifted.

    Sample n of epoch e is the original, padded by ``crop_pad`` on each side and cropped to its size at a random
    place (a shift in each spatial dimension), then mirrored in each dimension of ``flip`` with probability ½. Targets
    per voxel (labels of the spatial shape, real numbers of the spatial shape and channels) move along. Zeros are set after normalisation (the mean colour); label 0 for targets.

    Notes
    -----
    A box reads the original box widened by ``crop_pad``, once per combination of flips, never the whole sample.
    """

    def __init__(self, dataset: Dataset, augment: Augment, seed: int, epoch: int) -> None:
        super().__init__(dataset, augment, seed, epoch)
        self._pad = augment.crop_pad
        self._flip = np.array([n in augment.flip for n in "DHW"[3 - len(self._space) :]], bool)
        self._keys = fold(seed, _FLIP, epoch), fold(seed, _SHIFT, epoch)

    def _read(self, samples: NDArray[np.int64], box: Box) -> Array:
        return self._moved(self._source.read, samples, box)

    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> Array:
        read = self._source.read_targets
        return self._moved(read, samples, box) if self.targets_move else read(samples, box)

    def _moved(self, read: Any, samples: NDArray[np.int64], box: Box) -> Array:
        flips, shifts = self._draw(samples)
        if not len(samples):
            return np.asarray(read(samples, box))
        out: Array | None = None
        for pattern in np.unique(flips, axis=0):
            rows = np.flatnonzero((flips == pattern).all(axis=1))
            part = self._one_pattern(read, samples[rows], box, pattern, shifts[rows])
            out = np.empty((len(samples), *part.shape[1:]), part.dtype) if out is None else out
            out[rows] = part
        assert out is not None
        return out

    def _one_pattern(
        self, read: Any, samples: NDArray[np.int64], box: Box, flips: NDArray[np.bool_], shifts: NDArray[np.int64]
    ) -> Array:
        """Read samples that are flipped alike."""
        dims = len(self._space)
        source: list[Runs] = []
        index: list[NDArray[np.int64]] = []
        inside: list[NDArray[np.bool_]] = []
        for d, extent in enumerate(self._space):
            at = indices(box[d])
            at = extent - 1 - at if flips[d] else at
            # The widened box depends on the flips only, not on the shifts, so that a cache below sees few boxes.
            lo = max(0, int(at.min()) - self._pad) if len(at) else 0
            hi = min(extent, int(at.max()) + 1 + self._pad) if len(at) else 0
            source.append(((lo, hi),))
            from_ = at + shifts[:, d : d + 1]
            inside.append((from_ >= 0) & (from_ < extent))
            index.append(np.clip(from_, lo, max(lo, hi - 1)) - lo)
        block = read(samples, (*source, *box[dims:]))
        if any(hi == lo for ((lo, hi),) in source):
            return np.empty((len(samples), *(i.shape[1] for i in index), *block.shape[1 + dims :]), block.dtype)
        rows = np.arange(len(samples)).reshape(-1, *(1,) * dims)
        moved: Array = block[(rows, *(_along(i, d, dims) for d, i in enumerate(index)))]
        for d, ok in enumerate(inside):
            if not ok.all() and self._augment.border == "zero":
                mask = _along(ok, d, dims).reshape(*_along(ok, d, dims).shape, *(1,) * (moved.ndim - 1 - dims))
                moved = np.where(mask, moved, moved.dtype.type(0))
        return moved

    def _draw(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Draw flips and shifts, (n, spatial dimensions) each."""
        where = samples[:, None] * _DIMS + np.arange(len(self._space))
        flips = ((bits(self._keys[0], where) >> np.uint64(63)) == 1) & self._flip
        shifts = integers(self._keys[1], where, 2 * self._pad + 1) - self._pad
        return flips, shifts


def _along(index: Array, d: int, dims: int) -> Array:
    """Shape (n, L) as (n, 1, ..., L, ..., 1) with L at spatial dimension d."""
    return index.reshape(len(index), *(index.shape[1] if i == d else 1 for i in range(dims)))
