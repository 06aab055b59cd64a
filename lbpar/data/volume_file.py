"""One file of a volume: what its header says, and its values; NIfTI and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.errors import DataError

Array = NDArray[Any]
SUFFIXES = (".nii.gz", ".nii", ".npy")


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
    read : callable
        Returns all values.
    """

    path: Path
    shape: tuple[int, int, int, int]
    dtype: np.dtype[Any]
    affine: Array | None
    orientation: Array | None
    read: Callable[[], Array]


def is_volume(path: Path) -> bool:
    """Whether a name is that of a volume."""
    return path.name.lower().endswith(SUFFIXES)


def stem(path: Path) -> str:
    """A name without its suffix, ``.nii.gz`` being one."""
    return path.name[: -len(".nii.gz")] if path.name.lower().endswith(".nii.gz") else path.stem


def look_volume(path: Path) -> VolumeFile:
    """Read the header of a file.

    Raises
    ------
    DataError
        It cannot be read, or holds no volume of whole or real numbers; or nibabel is missing.
    """
    try:
        found = _npy(path) if path.suffix.lower() == ".npy" else _nifti(path)
    except ImportError as e:
        raise DataError(f"{path}: reading it needs {e.name}; `pip install lbpar[volumes]`.") from None
    except DataError:
        raise
    except Exception as e:  # noqa: BLE001 - of damaged files, the libraries raise whatever happens
        raise DataError(f"{path}: cannot be read as a volume: {' '.join(str(e).split())}.") from None
    if found.dtype.kind not in "iufb" or found.dtype.itemsize > 8:
        raise DataError(f"{path}: it holds values of type {found.dtype}, expected whole or real numbers.")
    return found


def _checked(path: Path, read: Callable[[], Array]) -> Callable[[], Array]:
    def checked() -> Array:
        try:
            return read()
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


def _npy(path: Path) -> VolumeFile:
    held = np.load(path, mmap_mode="r", allow_pickle=False)
    shape = _four(path, held.shape)
    dtype = held.dtype.newbyteorder("=")
    return VolumeFile(path, shape, dtype, None, None, lambda: np.asarray(held, dtype).reshape(shape))


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

    def read() -> Array:
        values = np.asanyarray(nibabel.load(path).dataobj).astype(dtype, copy=False).reshape(stored)  # type: ignore[attr-defined]
        return np.ascontiguousarray(apply_orientation(values, orientation))

    depth, height, width = (stored[axis] for axis in order)
    affine = image.affine @ inv_ornt_aff(orientation, stored[:3])
    return VolumeFile(path, (depth, height, width, stored[3]), dtype, affine, orientation, _checked(path, read))
