"""Volumes as they lie in their files, read like the samples of a dataset: for prediction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lbpar.config.paths import as_path
from lbpar.data.dataset import Dataset
from lbpar.data.normalise import Normalisation
from lbpar.data.volume_file import is_volume, look_volume
from lbpar.data.volumes import Fit, open_volumes
from lbpar.errors import DataError
from lbpar.layout.runs import Box, indices

Array = NDArray[Any]


class VolumeDataset(Dataset):
    """Samples without targets, a file each.

    Each rank reads whole files, one at a time, and keeps its box.

    Parameters
    ----------
    path : str or Path
        A NIfTI or NumPy volume, or a folder of them.
    shape : (D, H, W)
        What the network takes; smaller volumes are padded at the end, as conversion pads them.
    dtype : dtype
        What reading returns.
    larger : bool
        Volumes may be larger, as the network is shown patches: all are padded to the largest.

    Attributes
    ----------
    files : list of Path
    """

    def __init__(self, path: str | Path, shape: Sequence[int], dtype: DTypeLike, larger: bool = False) -> None:
        path = as_path(path)
        self.files = sorted(f for f in path.iterdir() if is_volume(f) and f.name[0] != ".") if path.is_dir() else [path]
        if not self.files:
            raise DataError(f"{path}: there are no volumes (.nii, .nii.gz, .npy) in this folder.")
        if larger:
            shape = np.max([tuple(shape), *(look_volume(f).shape[:3] for f in self.files)], axis=0).tolist()
        self._x, _, _, _ = open_volumes(self.files, fit=Fit(inside=shape))
        self._last: tuple[int, Array] | None = None
        self.name, self.classes, self._dtype = str(path), None, np.dtype(dtype)
        self.sample_shape, self.target_shape = self._x.shape[1:], ()
        kind = self._x.dtype
        self.normalisation = Normalisation(1 / 255 if kind == np.uint8 else 1.0, integers=kind.kind in "iu")

    def __len__(self) -> int:
        return len(self._x)

    def normalise_like(self, other: Normalisation) -> None:
        """Take mean and standard deviation of the training data.

        Raises
        ------
        DataError
            The training data were scaled in another way.
        """
        if other.scale != self.normalisation.scale:
            raise DataError(
                f"{self.name}: it holds {self._x.dtype}, which is scaled by {self.normalisation.scale:g}, expected values scaled by "
                f"{other.scale:g} as those of the training file; store it in the type of the training data."
            )
        self.normalisation = self.normalisation.like(other)

    def close(self) -> None:
        """Forget the volume that was read last."""
        self._last = None

    def _read(self, samples: NDArray[np.int64], box: Box) -> Array:
        where = np.ix_(*map(indices, box))
        parts = np.empty((len(samples), *(len(indices(runs)) for runs in box)), self._x.dtype)
        ruled, found = self.normalisation.rule is not None, []
        for part, i in zip(parts, samples.tolist(), strict=True):
            if part.size:
                if self._last is None or self._last[0] != i:
                    self._last = i, self._x[i : i + 1][0]
                part[...] = self._last[1][where]
                if ruled:
                    found.append(self.normalisation.statistics(self._last[1]))
        self.normalisation.check_finite(parts, samples, self.name)
        return self.normalisation(parts, self._dtype, indices(box[-1]), np.array(found) if ruled and found else None)

    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> Array:
        raise DataError(f"{self.name}: volumes in files have no targets; they can be predicted, not evaluated.")
