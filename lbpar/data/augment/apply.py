"""The changes that a run file asks for, one on top of the other."""

from __future__ import annotations

import zlib
from importlib.util import find_spec

from lbpar.config.augment import Augment
from lbpar.data.augment.changed import Changed, target_space
from lbpar.data.augment.filters import Blurred, Coarsened
from lbpar.data.augment.mirror import Mirrored
from lbpar.data.augment.tones import Toned
from lbpar.data.augment.warp import Warped
from lbpar.data.dataset import Dataset
from lbpar.data.named import NamedDataset
from lbpar.errors import DataError
from lbpar.random import fold

CHANGES: dict[type[Changed], tuple[str, ...]] = {
    Warped: ("rotate", "scale", "elastic"),
    Mirrored: ("flip", "crop_pad"),
    Coarsened: ("low_resolution",),
    Blurred: ("blur",),
    Toned: ("contrast", "brightness", "gamma", "noise"),
}
"""In the order in which they are done, by the fields that ask for them."""
_SPATIAL = [field for change, fields in CHANGES.items() if change is not Toned for field in fields]
_MOVES = [field for change in (Warped, Mirrored) for field in CHANGES[change]]
_SCIPY = ("rotate", "scale", "elastic", "blur")


def augmented(dataset: Dataset, augment: Augment, seed: int, epoch: int) -> Dataset:
    """A dataset as one epoch sees it; the same if nothing is asked for. Of several inputs and targets, those with pixels or voxels move alike, and
    each input has its own tones and noise.

    Raises
    ------
    DataError
        These samples cannot be changed so, or scipy is missing.
    """
    asked = [name for fields in CHANGES.values() for name in fields if getattr(augment, name)]
    if isinstance(dataset, NamedDataset):
        sizes = {one.sample_shape[:-1] for one in dataset.inputs.values()} - {()}
        apart = next((name for name in asked if name in _SPATIAL and name != "flip"), None)
        if apart and len(sizes) > 1:
            raise DataError(
                f"data.augment.{apart}: got inputs of the sizes {', '.join(map(str, sorted(sizes)))}, expected a single one; leave it out."
            )
        return dataset.map(
            lambda name, one: _changed(one, augment, asked, seed, epoch, name) if len(one.sample_shape) > 1 else one
        )
    return _changed(dataset, augment, asked, seed, epoch)


def _changed(dataset: Dataset, augment: Augment, asked: list[str], seed: int, epoch: int, name: str = "") -> Dataset:
    _check(dataset, augment, asked)
    own = fold(seed, zlib.crc32(name.encode())) if name else seed
    for change, fields in CHANGES.items():
        if set(fields) & set(asked):
            dataset = change(dataset, augment, own if change is Toned else seed, epoch)
    return dataset


def _check(dataset: Dataset, augment: Augment, asked: list[str]) -> None:
    shape = dataset.sample_shape
    names = "DHW"[4 - len(shape) :] if len(shape) > 1 else ""
    for dim in augment.flip:
        if dim not in names:
            raise DataError(
                f"data.augment.flip: got '{dim}', expected a spatial dimension of the samples: "
                f"{', '.join(names) or 'none'} (samples {shape})."
            )
    for name in asked:
        least = 2 if name == "rotate" else 1
        if name in _SPATIAL and len(names) < least:
            raise DataError(
                f"data.augment.{name}: got samples of shape {shape}, expected at least {least} spatial dimension{'s' * (least > 1)}."
            )
    if "crop_pad" in asked and augment.border == "zero" and augment.crop_pad >= min(shape[:-1]):
        raise DataError(
            f"data.augment.crop_pad: got {augment.crop_pad} for samples of shape {shape}, expected less than {min(shape[:-1])}: nothing of "
            "a sample would be left where it is shifted so far."
        )
    moved = next((name for name in asked if name in _MOVES), None)
    if moved and target_space(dataset) not in ((), shape[:-1]):
        raise DataError(
            f"data.augment.{moved}: got targets of shape {dataset.target_shape} for samples of shape {shape}, expected a label or numbers for each "
            "pixel or voxel, or a vector: targets of another size cannot move with the samples; leave it out."
        )
    needs = next((name for name in asked if name in _SCIPY), None)
    if needs and find_spec("scipy") is None:
        raise DataError(f"data.augment.{needs}: it needs scipy, which is not installed; `pip install lbpar[volumes]`.")
