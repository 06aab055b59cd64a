"""Volumes as they lie in their files, read like the samples of a dataset: for prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lbpar.config.paths import as_path
from lbpar.data.dataset import Dataset
from lbpar.data.formats.volume_file import is_volume, look_volume
from lbpar.data.formats.volumes import Fit, least_of, open_volumes
from lbpar.data.normalise import Normalisation
from lbpar.errors import DataError
from lbpar.layout.runs import Box, indices

Array = NDArray[Any]
_PADDED = 1 << 20
"""Elements at a time."""


class VolumeDataset(Dataset):
    """Samples without targets, a file each.

    Each rank reads its box of a file, a few planes at a time (those of a compressed file pass by until the last that it needs), and holds nothing else;
    only a volume that it reads more than once, as by windows, is kept in its own type, up to ``cache`` bytes.
    Where statistics of a whole volume are asked for, or what is padded with its least value, it is read once more for these; ranks share that
    (`lbpar.data.shared.explored`).

    Parameters
    ----------
    path : str or Path
        A NIfTI or NumPy volume, or a folder of them.
    shape : (D, H, W)
        What the network takes; smaller volumes are padded at the end, as conversion pads them.
    dtype : dtype
        What reading returns.
    larger : bool
        Volumes may be larger, and each of a size of its own, as the network is shown patches.
    cache : int, bytes

    Attributes
    ----------
    files : list of Path
    """

    def __init__(
        self, path: str | Path, shape: Sequence[int], dtype: DTypeLike, larger: bool = False, cache: int = 64_000_000
    ) -> None:
        path = as_path(path)
        self.files = sorted(f for f in path.iterdir() if is_volume(f) and f.name[0] != ".") if path.is_dir() else [path]
        if not self.files:
            raise DataError(f"{path}: there are no volumes (.nii, .nii.gz, .npy, .raw) in this folder.")
        self._volumes = [look_volume(f) for f in self.files]
        self._sizes = [tuple(shape)] * len(self.files)
        if larger:
            self._sizes = [tuple(np.maximum(shape, v.shape[:3]).tolist()) for v in self._volumes]
        largest = np.max(self._sizes, axis=0).tolist()
        x, _, _, self._beside = open_volumes(self.files, fit=Fit(inside=largest))  # refuses what does not go together
        self._room, self._last = cache, -1
        self._held: tuple[int, Array] | None = None
        self._stored, self._least, self._statistics = x.dtype, dict[int, Any](), dict[int, Array]()
        self.name, self.classes, self._dtype = str(path), None, np.dtype(dtype)
        self.sample_shape, self.target_shape = x.shape[1:], ()
        self.normalisation = Normalisation(
            1 / 255 if self._stored == np.uint8 else 1.0, integers=self._stored.kind in "iu"
        )

    def __len__(self) -> int:
        return len(self.files)

    def beside(self, *names: str) -> list[Array] | None:
        """As a file that they were converted to would."""
        return [self._beside[n] for n in names] if set(names) <= set(self._beside) else None

    def extents(self, n: int) -> tuple[int, ...]:
        return self._sizes[n]

    def normalise_like(self, other: Normalisation) -> None:
        """Take mean and standard deviation of the training data.

        Raises
        ------
        DataError
            The training data were scaled in another way.
        """
        self.normalisation.check_scale(other, self.name, self._stored, "Store them in the type of the training data")
        self.normalisation, self._statistics = self.normalisation.like(other), {}

    def own_findings(self, samples: range, skip: bool = False) -> tuple[dict[int, Array], set[int]]:
        """Statistics, and in a fifth row the least value, where these are asked for."""
        found, rule = {}, self.normalisation.rule
        for n in samples:
            asks = rule is not None and rule.asks
            if not asks and not self._padded(n):
                continue
            least = self._least_of(n) if self._padded(n) else 0
            rows = self._statistics_of(n) if asks else np.zeros((4, self.sample_shape[-1]))
            found[n] = np.array([*rows, np.full(self.sample_shape[-1], least)])
        return found, set()

    def learn(self, statistics: Mapping[int, Array]) -> None:
        for n, rows in statistics.items():
            self._least[n] = self._stored.type(rows[4, 0])
            if self.normalisation.rule is not None and self.normalisation.rule.asks:
                self._statistics[n] = rows[:4]

    def _padded(self, n: int) -> bool:
        return self._volumes[n].shape[:3] != self._sizes[n]

    def _least_of(self, n: int) -> Any:
        """What a volume is padded with."""
        if n not in self._least:
            self._least[n] = self._stored.type(least_of(self._pieces(n, None)))
        return self._least[n]

    def _statistics_of(self, n: int) -> Array:
        if n not in self._statistics:
            self._statistics[n] = self.normalisation.streamed(lambda c: self._all(n, c), self.sample_shape[-1])
        return self._statistics[n]

    def _pieces(self, n: int, channel: int | None) -> Iterator[Array]:
        """Values of a volume, some at a time."""
        volume = self._volumes[n]
        spans = [(0, e) for e in volume.shape[:3]]
        return (part.astype(self._stored, copy=False) for _, part in volume.parts(spans, channel))

    def _all(self, n: int, channel: int) -> Iterator[Array]:
        """The same with what is padded."""
        yield from self._pieces(n, channel)
        left = (prod(self._sizes[n]) - prod(self._volumes[n].shape[:3])) if self._padded(n) else 0
        while left:
            some = min(left, _PADDED)
            yield np.full(some, self._least_of(n))
            left -= some

    def _read(self, samples: NDArray[np.int64], box: Box) -> Array:
        *space, channels = (indices(runs) for runs in box)
        parts = np.empty((len(samples), *map(len, space), len(channels)), self._stored)
        for part, n in zip(parts, samples.tolist(), strict=True):
            if part.size:
                self._fill(part, n, space, channels)
        rule = self.normalisation.rule
        own = np.array([self._statistics_of(n) for n in samples.tolist()]) if rule is not None and parts.size else None
        return self.normalisation.checked(parts, samples, self.name, self._dtype, channels, own)

    def _fill(self, out: Array, n: int, space: Sequence[Array], channels: Array) -> None:
        """Read places of a volume, and pad."""
        volume = self._volumes[n]
        inside = [i[i < e] for i, e in zip(space, volume.shape, strict=False)]
        if any(len(i) < len(s) for i, s in zip(inside, space, strict=True)):
            out[...] = self._least_of(n)
        if all(map(len, inside)):
            spans = [(int(i[0]), int(i[-1]) + 1) for i in inside]
            held = self._values(n, spans)[np.ix_(*(i - lo for i, (lo, _) in zip(inside, spans, strict=True)), channels)]
            out[tuple(slice(len(i)) for i in inside)] = held

    def _values(self, n: int, spans: Sequence[tuple[int, int]]) -> Array:
        """Values inside spans. A volume that is read again, as by windows, is kept if it is small."""
        volume, before = self._volumes[n], self._last
        self._last = n
        if self._held is None or self._held[0] != n:
            self._held = None
            if n != before or prod(volume.shape) * volume.dtype.itemsize > self._room:
                return volume.read(spans)
            self._held = n, volume.read()
        return self._held[1][tuple(slice(*s) for s in spans)]

    def close(self) -> None:
        """Forget the volume that is kept."""
        self._held = None

    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> Array:
        raise DataError(f"{self.name}: volumes in files have no targets; they can be predicted, not evaluated.")
