"""One file of a volume: what its header, or its name, says, and its values; NIfTI, NumPy and raw numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import DataError

Array = NDArray[Any]
Spans = Sequence[tuple[int, int]]
Parts = Iterator[tuple[tuple[slice, ...], Array]]
_PART = 1 << 20
"""Elements that are read at a time."""
SUFFIXES = (".nii.gz", ".nii", ".npy", ".raw")
_RAW = re.compile(r"(.+)_(\d+)x(\d+)x(\d+)_(u?int(?:8|16|32)|float(?:16|32|64))\.raw", re.IGNORECASE)
"""Names of files of raw numbers, as the Open Scientific Visualization Datasets have them: width, height and depth, of which the first varies
fastest, and the type, little-endian."""


@dataclass(frozen=True)
class VolumeFile:
    """A volume that is read when it is asked for.

    Attributes
    ----------
    path : Path
    shape : (D, H, W, C)
        Of a NIfTI file: to the right, to the front, upwards (RAS+), whatever order the file has.
    dtype : dtype
        Of the file; float32 or float64 where it says how to scale whole numbers.
    affine : (4, 4) array or None
        From indices of this order to millimetres; None where the file does not say.
    orientation : (3, 2) array or None
        Nibabel's, from the file's order to this one.
    parts : callable
        Gives the values inside spans (lo, hi) of D, H and W, of one channel or of all, as slices of what lies inside and values (d, h, w, c) in
        ``dtype``, in the order of the file, about a million at a time.
    space : int
        NIfTI's code of the space that ``affine`` leads to, as 1 of a scanner or 4 of MNI's template; 0 where the file does not say.
    """

    path: Path
    shape: tuple[int, int, int, int]
    dtype: np.dtype[Any]
    affine: Array | None
    orientation: Array | None
    parts: Callable[[Spans, int | None], Parts]
    space: int = 0

    def read(self, spans: Spans | None = None) -> Array:
        """The values inside spans of D, H and W; default: all."""
        spans = tuple((0, e) for e in self.shape[:3]) if spans is None else spans
        out = np.empty((*(max(0, hi - lo) for lo, hi in spans), self.shape[3]), self.dtype)
        if out.size:
            for where, part in self.parts(spans, None):
                out[where] = part
        return out


def is_volume(path: Path) -> bool:
    """Whether a name is that of a volume."""
    return path.name.lower().endswith(SUFFIXES)


def stem(path: Path) -> str:
    """A name without its suffix, ``.nii.gz`` and ``_7x6x5_uint8.raw`` being one each."""
    raw = _RAW.fullmatch(path.name)
    if raw:
        return raw[1]
    return path.name[: -len(".nii.gz")] if path.name.lower().endswith(".nii.gz") else path.stem


def look_volume(path: Path) -> VolumeFile:
    """Read the header of a file.

    Raises
    ------
    DataError
        It cannot be read, or holds no volume of whole or real numbers; or nibabel is missing.
    """
    try:
        kind = path.suffix.lower()
        if kind in (".npy", ".raw"):
            held = _raw(path) if kind == ".raw" else np.load(path, mmap_mode="r", allow_pickle=False)
            found = _mapped(path, held)
        else:
            found = _nifti(path)
    except ImportError as e:
        raise DataError(f"{path}: reading it needs {e.name}; `pip install lbpar[volumes]`.") from None
    except DataError:
        raise
    except Exception as e:  # noqa: BLE001 - of damaged files, the libraries raise whatever happens
        raise DataError(f"{path}: cannot be read as a volume: {' '.join(str(e).split())}.") from None
    if found.dtype.kind not in "iufb" or found.dtype.itemsize > 8:
        raise DataError(f"{path}: it holds values of type {found.dtype}, expected whole or real numbers.")
    return found


def _checked(path: Path, parts: Callable[[Spans, int | None], Parts]) -> Callable[[Spans, int | None], Parts]:
    def checked(spans: Spans, channel: int | None) -> Parts:
        try:
            yield from parts(spans, channel)
        except Exception as e:  # noqa: BLE001 - as above
            raise DataError(f"{path}: cannot be read to its end: {' '.join(str(e).split())}.") from None

    return checked


def _four(path: Path, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """(D, H, W, C) of a volume with or without channels."""
    if len(shape) == 5 and shape[3] == 1:  # NIfTI keeps vectors in its fifth dimension; the fourth is time
        shape = (*shape[:3], shape[4])
    if len(shape) not in (3, 4) or 0 in shape:
        raise DataError(f"{path}: got values of shape {shape}, expected a volume (D, H, W), or (D, H, W, channels).")
    depth, height, width, channels = (*shape, 1)[:4]
    return depth, height, width, channels


def _raw(path: Path) -> Array:
    named = _RAW.fullmatch(path.name)
    if named is None:
        raise DataError(
            f"{path}: the name of a file of raw numbers says its size and type, as in head_256x256x128_uint16.raw: width, height, depth "
            "(the width varies fastest, the lowest byte comes first); rename it."
        )
    dtype, shape = np.dtype(named[5].lower()).newbyteorder("<"), tuple(int(named[i]) for i in (4, 3, 2))
    size, wanted = path.stat().st_size, dtype.itemsize * prod(shape)
    if size != wanted or not size:
        raise DataError(f"{path}: it has {size:,} bytes, expected {wanted:,}, as its name says.")
    return np.memmap(path, dtype, "r", shape=shape)


def _mapped(path: Path, held: Array) -> VolumeFile:
    """A file of numbers that the operating system reads where they are asked for."""
    shape = _four(path, held.shape)
    dtype = held.dtype.newbyteorder("=")

    def parts(spans: Spans, channel: int | None) -> Parts:
        (first, last), *inner = spans
        some = slice(None) if channel is None else slice(channel, channel + 1)
        values = held.reshape(shape)[(slice(None), *(slice(*s) for s in inner), some)]  # of the file, still
        for lo, hi in _runs(first, last, values.shape[1:]):
            yield (slice(lo - first, hi - first),), np.asarray(values[lo:hi], dtype)

    return VolumeFile(path, shape, dtype, None, None, _checked(path, parts))


def _runs(first: int, last: int, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Planes of a shape, some at a time."""
    step = max(1, _PART // max(1, prod(shape)))
    return ((at, min(at + step, last)) for at in range(first, last, step))


def _nifti(path: Path) -> VolumeFile:
    import nibabel
    from nibabel.orientations import apply_orientation, inv_ornt_aff, io_orientation

    image: Any = nibabel.load(path)
    stored = _four(path, image.shape)
    if image.affine is None or not np.isfinite(image.affine).all() or np.linalg.matrix_rank(image.affine) < 4:
        raise DataError(
            f"{path}: its affine is {np.asarray(image.affine).tolist()}, expected one that can be inverted."
        )
    orientation = io_orientation(image.affine)
    order = np.argsort(orientation[:, 0]).tolist()
    dtype = np.dtype(image.get_data_dtype()).newbyteorder("=")
    if (image.dataobj.slope, image.dataobj.inter) != (1, 0) and dtype.kind in "iufb":
        # The scale has float32's digits, of which whole numbers of 16 bits leave enough.
        dtype = np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)

    def parts(spans: Spans, channel: int | None) -> Parts:
        # Whole planes of the file's slowest dimension, forwards: a compressed file is decompressed once, and none of it is kept.
        proxy = nibabel.load(path, keep_file_open=True).dataobj  # type: ignore[attr-defined]
        own = [spans[int(axis)] for axis in orientation[:, 0]]
        own = [
            (lo, hi) if way > 0 else (e - hi, e - lo)
            for (lo, hi), way, e in zip(own, orientation[:, 1], stored, strict=False)
        ]
        for c in range(stored[3]) if channel is None else [channel]:
            rest = {3: (), 4: (c,), 5: (0, c)}[len(image.shape)]
            for lo, hi in _runs(*own[2], stored[:2]):
                planes = proxy[(slice(None), slice(None), slice(lo, hi), *rest)].reshape(*stored[:2], hi - lo)
                values = planes[slice(*own[0]), slice(*own[1])].astype(dtype, copy=False)
                at = [slice(None), slice(None), slice(lo - own[2][0], hi - own[2][0])]
                here = [at[int(file)] for file in order]
                for d, way in enumerate(orientation[order, 1]):
                    if way < 0 and here[d] != slice(None):
                        extent = own[2][1] - own[2][0]
                        here[d] = slice(extent - here[d].stop, extent - here[d].start)
                yield (
                    (*here, slice(c, c + 1) if channel is None else slice(1)),
                    apply_orientation(values, orientation)[..., None],
                )

    depth, height, width = (stored[axis] for axis in order)
    affine = image.affine @ inv_ornt_aff(orientation, stored[:3])
    space = int(image.header["sform_code"]) or int(image.header["qform_code"])
    return VolumeFile(path, (depth, height, width, stored[3]), dtype, affine, orientation, _checked(path, parts), space)
