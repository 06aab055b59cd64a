"""Volumes in files, and label maps beside them, as samples of one size: resampled and padded where that was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.formats.volume_file import VolumeFile, look_volume
from lbpar.data.pieces import Rows
from lbpar.errors import DataError

Array = NDArray[Any]
_NEAR = 0.1  # sides of a voxel: headers keep float32, and programs round


@dataclass(frozen=True)
class Fit:
    """How volumes come to one size.

    Parameters
    ----------
    spacing : sequence of float, optional
        Resample to voxels of this size in millimetres, one number or (D, H, W).
    shape : sequence of int, optional
        Resample to so many voxels, (D, H, W).
    pad : int, optional
        Pad at the end of each dimension to the largest volume, rounded up to a multiple of this.
    inside : sequence of int, optional
        Pad to this size, that of a network's input.
    each : bool
        Each volume becomes a split of its own, of its own size.
    """

    spacing: Sequence[float] | None = None
    shape: Sequence[int] | None = None
    pad: int | None = None
    inside: Sequence[int] | None = None
    each: bool = False

    def __post_init__(self) -> None:
        if self.spacing is not None and self.shape is not None:
            raise DataError("convert: got spacing and shape, expected one of them: each gives the other.")
        if self.spacing is not None and not (len(self.spacing) in (1, 3) and all(0 < s < np.inf for s in self.spacing)):
            raise DataError(f"convert: got the spacing {list(self.spacing)}, expected 1 or 3 numbers above 0.")
        if self.shape is not None and not (len(self.shape) == 3 and all(0 < n < 1 << 31 for n in self.shape)):
            raise DataError(f"convert: got the shape {list(self.shape)}, expected 3 whole numbers above 0: D H W.")
        if self.pad is not None and not 1 <= self.pad < 1 << 16:
            raise DataError(f"convert: got pad {self.pad}, expected a whole number of 1 or more.")

    def __bool__(self) -> bool:
        return (self.spacing, self.shape, self.pad, self.each) != (None, None, None, False)

    def resampling(self, file: VolumeFile) -> tuple[Array, tuple[int, ...]]:
        """Old voxels per new one along each dimension, and how many new ones there are."""
        old = np.array(file.shape[:3])
        if self.shape is not None:
            return old / np.array(self.shape), tuple(self.shape)
        if self.spacing is None:
            return np.ones(3), file.shape[:3]
        if file.affine is None:
            raise DataError(
                f"{file.path}: it does not say the size of its voxels, which `--spacing` needs; use `--shape`."
            )
        step = np.broadcast_to(np.array(self.spacing, float), 3) / sides(file.affine)
        return step, tuple(np.maximum(1, np.rint(old / step)).astype(int).tolist())


def sides(affine: Array) -> Array:
    """Lengths of a voxel's sides."""
    return np.sqrt((np.asarray(affine)[:3, :3] ** 2).sum(axis=0))


def resample(values: Array, step: Array, shape: Sequence[int], labels: bool = False) -> Array:
    """Values of (D, H, W, C) on another grid that begins at the same face of the volume.

    Images are interpolated linearly, and rounded where they are whole numbers; labels are those of the nearest voxel.
    Beyond the last centres, values are those of the edge.
    """
    from scipy.ndimage import affine_transform

    out = np.empty((*shape, values.shape[3]), values.dtype)
    whole = values.dtype.kind in "iub"
    for c in range(values.shape[3]):
        new = affine_transform(
            values[..., c].astype(np.float64),
            step,
            (step - 1) / 2,
            tuple(shape),
            order=0 if labels else 1,
            mode="nearest",
        )
        out[..., c] = np.rint(new) if whole else new
    return out


def open_volumes(
    images: list[Path], maps: list[Path] | None = None, fit: Fit | None = None
) -> tuple[Rows, Rows | None, str, dict[str, Array]]:
    """Volumes as samples, and label maps as their labels.

    Parameters
    ----------
    images : list of Path
        NIfTI, NumPy or raw files.
    maps : list of Path, optional
        A label map for each, on the same grid.
    fit : Fit

    Returns
    -------
    x : Rows, (files, D, H, W, C)
        In the type of the files; of several types, in the one that holds them all.
    y : Rows or None
    words : str
        What was done.
    beside : dict
        An entry per sample: ``files``, ``size`` before padding, and, where all files say it, ``affine`` and ``spacing``.

    Raises
    ------
    DataError
        What `look_volume` refuses; sizes that differ where nothing makes them alike; a label map on another grid than
        its image, or with values that are no whole numbers.
    """
    fit = Fit() if fit is None else fit
    files = [look_volume(f) for f in images]
    first, changes = files[0], [fit.resampling(f) for f in files]
    for f in files[1:]:
        if f.shape[3] != first.shape[3]:
            raise DataError(
                f"{f.path}: got {f.shape[3]} channels, expected {first.shape[3]} as {first.path.name}; leave one out."
            )
    sizes = np.array([shape for _, shape in changes])
    size = sizes.max(axis=0)
    odd = next((i for i, s in enumerate(sizes) if (s != sizes[0]).any()), None)
    if fit.inside is not None:
        large = next((i for i, s in enumerate(sizes) if (s > fit.inside).any()), None)
        if large is not None:
            raise DataError(
                f"{files[large].path}: got {_words(sizes[large])} voxels, expected {_words(fit.inside)} or fewer, the network's input; "
                "convert it with the `--shape` or `--spacing` of the training data."
            )
        size = np.array(fit.inside)
    elif fit.pad is not None:
        size = -(-size // fit.pad) * fit.pad
    elif odd is not None:
        raise DataError(
            f"{files[odd].path}: got {_words(sizes[odd])} voxels, expected {_words(sizes[0])} as {first.path.name}; "
            "`--pad` pads all to the largest, `--shape` resamples them."
        )
    labels = [look_volume(f) for f in maps] if maps is not None else []
    for image, label in zip(files, labels, strict=False):
        _check_pair(image, label)

    def rows(found: list[VolumeFile], dtype: np.dtype[Any], is_map: bool) -> Rows:
        tail = () if is_map else (first.shape[3],)

        def read(which: NDArray[np.int64]) -> Array:
            out = np.empty((len(which), *size.tolist(), *tail), dtype)
            for one, i in zip(out, which, strict=True):
                values, (step, shape) = found[i].read(), changes[i]
                if is_map:
                    values = _whole(values, found[i].path)
                if fit.spacing is not None or fit.shape is not None:
                    values = resample(values, step, shape, is_map)
                one[...] = 0 if is_map else least_of([values])
                one[tuple(slice(n) for n in shape)] = values[..., 0] if is_map else values
            return out

        return Rows((len(found), *size.tolist(), *tail), dtype, read)

    x = rows(files, np.result_type(*(_plain(f.dtype) for f in files)), False)
    y = rows(labels, np.result_type(*(_label_type(f.dtype) for f in labels)), True) if labels else None
    beside: dict[str, Array] = {"files": np.array([str(f.path).encode() for f in files]), "size": sizes}
    affines = [_changed(f.affine, step) for f, (step, _) in zip(files, changes, strict=True) if f.affine is not None]
    if len(affines) == len(files):
        beside |= {"affine": np.array(affines), "spacing": np.array([sides(a) for a in affines])}
    words = f"{len(files)} volume{'s'[: len(files) > 1]}" + (
        f", voxels resampled to {_words(size)}" if fit.spacing or fit.shape else ""
    )
    words += f", padded to {_words(size)}" if (sizes != size).any() else ""
    return x, y, words + (", RAS+" if first.affine is not None else ""), beside


def least_of(parts: Iterable[Array]) -> Any:
    """What volumes are padded with: the least value that is finite, or 0."""
    finite = (p if p.dtype.kind != "f" else p[np.isfinite(p)] for p in parts)
    return min((p.min() for p in finite if p.size), default=0)


def _check_pair(image: VolumeFile, label: VolumeFile) -> None:
    """Refuse a label map that is not one of this image."""
    if label.shape != (*image.shape[:3], 1):
        raise DataError(
            f"{label.path}: got {_words(label.shape)} values, expected {_words((*image.shape[:3], 1))}: one label for each "
            f"voxel of {image.path}."
        )
    if image.affine is not None and label.affine is not None:
        corners = np.array([*product(*((0, n) for n in image.shape[:3]))])
        moved = corners @ (image.affine - label.affine)[:3, :3].T + (image.affine - label.affine)[:3, 3]
        if np.abs(moved).max() > _NEAR * sides(image.affine).min():
            raise DataError(
                f"{label.path}: its affine is {label.affine[:3].round(4).tolist()}, expected {image.affine[:3].round(4).tolist()} "
                f"as {image.path}: they do not lie in the same place. Resample the map to the grid of its image, or correct its header."
            )


def _whole(values: Array, path: Path) -> Array:
    if values.dtype.kind != "f":
        return values
    out = np.rint(values)
    # Scaled labels are whole but for float32's rounding.
    wrong = ~(np.abs(values - out) <= 1e-4)
    if wrong.any():
        raise DataError(f"{path}: got the label {values[wrong][0]}, expected whole numbers: classes.")
    return out.astype(np.int32)


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.int8) if dtype.kind == "b" else dtype


def _label_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.uint8) if dtype.kind == "b" else np.dtype(np.int32) if dtype.kind == "f" else dtype


def _changed(affine: Array, step: Array) -> Array:
    """The affine of a resampled volume."""
    change = np.diag([*step, 1.0])
    change[:3, 3] = (step - 1) / 2
    return np.asarray(affine @ change)


def _words(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
