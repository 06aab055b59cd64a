"""Many heads of one: deformations and changes of brightness of a real T1 volume, with its brain or its regions as labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.config.augment import Augment
from lbpar.data.augment.apply import augmented
from lbpar.data.dataset import Dataset
from lbpar.data.formats.volumes import Fit, open_volumes
from lbpar.data.normalise import Normalisation
from lbpar.data.pieces import Rows
from lbpar.data.writer import Split, write
from lbpar.errors import DataError
from lbpar.layout.runs import Box, indices

Array = NDArray[Any]
SOURCE = "/usr/share/mricron/templates"
"""Where Debian's package mricron-data puts its volumes."""
_NODES = 32.0
"""Millimetres between the nodes that bend a head, which move by up to a quarter of that."""
_CLASSES = ("background", "frontal", "limbic", "occipital", "parietal", "deep", "temporal", "cerebellum")
_PARTS = {
    "frontal": r"Precentral|Frontal|Rolandic|Supp_Motor|Olfactory|Rectus",
    "limbic": r"Insula|Cingul|Hippocampus|ParaHippocampal|Amygdala",
    "occipital": r"Calcarine|Cuneus|Lingual|Occipital",
    "parietal": r"Postcentral|Parietal|SupraMarginal|Angular|Precuneus|Paracentral",
    "deep": r"Caudate|Putamen|Pallidum|Thalamus",
    "temporal": r"Fusiform|Heschl|Temporal",
    "cerebellum": r"Cerebel|Vermis",
}
"""Names of the atlas' regions, as its table has them, by class."""


def make_heads(
    path: str | Path,
    atlas: bool,
    source: str | Path = SOURCE,
    shape: Sequence[int] | None = None,
    samples: int = 8,
    test_samples: int = 2,
    seed: int = 0,
    gzip: bool = False,
    overwrite: bool = False,
) -> None:
    """Write deformed heads (samples, D, H, W, 1) as bytes, RAS+, with a label per voxel.

    Parameters
    ----------
    path : str or Path
        The file to write.
    atlas : bool
        Label seven parts of the brain instead of the brain.
    source : str or Path
        Folder with ``ch2.nii.gz``, the head; ``ch2bet.nii.gz``, what of it is brain; and for the atlas ``aal.nii.gz`` and the names of
        its regions, ``aal.nii.txt``.
    shape : sequence of int, optional
        Resample to so many voxels, (D, H, W).
    samples, test_samples : int
        Sizes of the two splits, of which no two heads are alike.
    seed : int
        Another seed makes other heads.
    gzip, overwrite : bool
        See `lbpar.data.writer.write`.

    Raises
    ------
    DataError
        A volume is missing or does not fit, or the file cannot be written.
    """
    folder, label = Path(source), "aal" if atlas else "ch2bet"
    missing = next((n for n in ("ch2.nii.gz", f"{label}.nii.gz") if not (folder / n).exists()), None)
    if missing:
        raise DataError(
            f"make {'atlas' if atlas else 'brain'}: no {missing} in '{folder}'; `apt-get install mricron-data`, or name its folder with --source."
        )
    if min(samples, test_samples + 1) < 1:
        raise DataError(
            f"make {'atlas' if atlas else 'brain'}: got {samples} and {test_samples} samples, expected at least one and none."
        )
    images, maps, _, beside = open_volumes([folder / "ch2.nii.gz"], [folder / f"{label}.nii.gz"], Fit(shape=shape))
    assert maps is not None
    image, values = images[:1][0], maps[:1][0]
    labels = _classes_of(folder / "aal.nii.txt")[values] if atlas else values > 0
    names = _CLASSES if atlas else ("background", "brain")
    changes = _changes(float(np.mean(beside["spacing"][0])))
    splits = []
    for salt, (name, n) in enumerate({"train": samples, "test": test_samples}.items()):
        if n:
            heads = augmented(_Heads(image, labels.astype(np.uint8), n, len(names)), changes, seed, salt)
            x = Rows((n, *image.shape), np.uint8, partial(_bytes, heads))
            y = Rows((n, *labels.shape), np.uint8, heads.read_targets)
            known = {k: np.repeat(v, n, axis=0) for k, v in beside.items() if k in ("affine", "spacing")}
            splits.append(Split(name, x, y, classes=len(names), class_names=names, beside=known))
    write(path, splits, gzip=gzip, overwrite=overwrite)


class _Heads(Dataset):
    """The same head again and again, with values from 0 to 1."""

    def __init__(self, image: Array, labels: Array, length: int, classes: int) -> None:
        top = float(image.max()) or 1.0
        self._x, self._y, self._length = image.astype(np.float32) / np.float32(top), labels, length
        self.name, self.classes, self.normalisation = "head", classes, Normalisation()
        self.sample_shape, self.target_shape = image.shape, labels.shape

    def __len__(self) -> int:
        return self._length

    def _read(self, samples: NDArray[np.int64], box: Box) -> Array:
        return np.repeat(self._x[np.ix_(*map(indices, box))][None], len(samples), axis=0)

    def _read_targets(self, samples: NDArray[np.int64], box: Box) -> Array:
        return np.repeat(self._y[np.ix_(*map(indices, box))][None], len(samples), axis=0)


def _changes(voxel: float) -> Augment:
    """What a head is changed by, its values being from 0 to 1 and its voxels so many millimetres wide: coarse heads are bent as fine ones are."""
    nodes = max(_NODES / voxel, 2.0)
    return Augment.model_validate(
        {
            "rotate": {"low": -10, "high": 10},
            "scale": {"low": 0.9, "high": 1.1},
            "elastic": {"spacing": nodes, "displacement": nodes / 4},
            "contrast": {"low": 0.8, "high": 1.2},
            "gamma": {"low": 0.75, "high": 1.33},
            "noise": {"low": 0.0, "high": 0.03},
        }
    )


def _bytes(heads: Dataset, rows: NDArray[np.int64]) -> Array:
    return np.rint(np.clip(heads.read(rows), 0, 1) * 255).astype(np.uint8)


def _classes_of(table: Path) -> Array:
    """The class of each of an atlas' numbers."""
    try:
        lines = [line.split() for line in table.read_text(encoding="utf-8").splitlines() if line.strip()]
        regions = {int(number): name for number, name, *_ in lines}
    except (OSError, ValueError) as e:
        raise DataError(
            f"make atlas: '{table}' cannot be read as lines of a number and a name: {' '.join(str(e).split())}."
        ) from None
    out = np.zeros(max(256, *(n + 1 for n in regions)), np.uint8)
    for number, region in regions.items():
        out[number] = next((_CLASSES.index(c) for c, words in _PARTS.items() if re.match(words, region)), 0)
    return out
