"""Files that predictions are written to, part by part: HDF5, NPY, NIfTI."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.data.dataset import Dataset
from lbpar.data.formats.volume_file import look_volume, stem
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.new_file import check_room, new_file
from lbpar.data.normalise import first_bad
from lbpar.data.volume_dataset import VolumeDataset
from lbpar.errors import DataError
from lbpar.whole_file import beside

Array = NDArray[Any]
Put = Callable[[tuple[slice, ...], Array], None]
PutNamed = Callable[[str, tuple[slice, ...], Array], None]
SUFFIXES = (".h5", ".hdf5", ".npy", ".nii", ".nii.gz")
BESIDE = ("files", "size", "affine", "spacing")
"""What files of predictions say of each sample as the data do (`lbpar.data.formats.volumes`): where it is from and lies, and its size before padding."""
_HEADER = 352  # of a NIfTI file: bytes before its values


@dataclass(frozen=True)
class _Place:
    """Where a volume lies, its size before padding, and the order of its file."""

    name: str
    size: tuple[int, ...]
    affine: Array
    orientation: Array
    space: int = 0


def prediction_file(
    path: Path, data: Dataset, shape: Sequence[int], dtype: np.dtype[Any], labels: bool
) -> AbstractContextManager[Put]:
    """A file that takes its name when the block ends well; the block gets a call that writes a part.

    Parameters
    ----------
    path : Path
        HDF5 (dataset ``y``, and ``labels``), NPY or NIfTI by its name; a name without suffix is a folder of NIfTI files.
    data : Dataset
        What is predicted; NIfTI takes its places, and HDF5 what it says of each sample (`BESIDE`).
    shape : (samples, ..., channels)
        Of the scores.
    dtype : dtype
    labels : bool
        The channel with the largest score: beside the scores in HDF5, instead of them in the others.

    Raises
    ------
    DataError
        The file cannot be written, or not in this form.
    """
    if labels and (len(shape) < 2 or shape[-1] < 2):
        raise DataError(
            f"predict: the network's output has the shape {tuple(shape[1:])}, expected a score per class for labels."
        )
    if path.suffix in (".h5", ".hdf5"):
        return _alone(several_in_hdf5(path, data, {"y": shape}, dtype, {"y": "labels"} if labels else {}))
    if labels:
        shape, dtype = shape[:-1], label_type(shape[-1])
    if path.suffix == ".npy":
        return _with_labels(_npy(path, shape, dtype), labels)
    places = _places(path, data, shape, labels)
    return _with_labels(_volumes(path, places, () if labels or shape[-1] == 1 else (shape[-1],), dtype), labels)


def described(path: Path, data: Any, shape: Sequence[int], dtype: np.dtype[Any], labels: bool) -> str:
    """What such a file holds, in words; parameters as of `prediction_file`."""
    hdf5 = path.suffix in (".h5", ".hdf5")
    channels = [] if labels and not hdf5 else [shape[-1]]
    dtype = label_type(shape[-1]) if labels and not hdf5 else dtype
    beside_it = ", and labels" if labels and hdf5 else ""
    if hdf5 or path.suffix == ".npy":
        return f"{' x '.join(map(str, [*shape[:-1], *channels]))}, {dtype}{beside_it}"
    sizes = [p.size for p in _places(path, data, shape, False)]
    first = " x ".join(map(str, [*sizes[0], *(c for c in channels if c > 1)]))
    if len(sizes) == 1:
        return f"{first}, {dtype}"
    return f"{len(sizes)} volumes {'like' if len({*sizes}) > 1 else 'of'} {first}, {dtype}"


def check_scores(part: Array, output: str, first: int = 0) -> None:
    """Refuse scores of an output that are not finite, from sample ``first`` on.

    Raises
    ------
    DataError
        Names the first sample.
    """
    if not np.isfinite(part).all():
        bad = first_bad(part, range(first, first + len(part)))
        raise DataError(
            f"predict: output {output!r} of sample {bad} is not finite; the sample has values far from those of training, or "
            "the network's weights are not finite."
        )


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse to replace what is there, unless that is wanted; a folder of predictions may be there."""
    if path.is_dir() and not path.suffix and (overwrite or not any(path.iterdir())):
        return
    if path.is_dir() or (path.exists() and not overwrite):
        raise DataError(f"--out: {path} exists; --overwrite replaces a file, or give another name.")


def label_type(classes: int) -> np.dtype[Any]:
    """The smallest type that NIfTI readers know for so many classes."""
    return np.dtype(np.uint8 if classes <= 1 << 8 else np.int16 if classes <= 1 << 15 else np.int32)


@contextmanager
def _with_labels(file: AbstractContextManager[Put], labels: bool) -> Iterator[Put]:
    with file as put:
        yield (lambda where, part: put(where[: part.ndim - 1], part.argmax(-1))) if labels else put


@contextmanager
def _alone(file: AbstractContextManager[PutNamed]) -> Iterator[Put]:
    with file as put:
        yield lambda where, part: put("y", where, part)


@contextmanager
def several_in_hdf5(
    path: Path, data: Dataset, shapes: Mapping[str, Sequence[int]], dtype: np.dtype[Any], labels: Mapping[str, str]
) -> Iterator[PutNamed]:
    """A file with a dataset of scores for each output; parameters as of `prediction_file`.

    ``labels``: for outputs whose best class is wanted as well, the name of its dataset.
    """
    check_room(path.resolve(), sum(map(prod, shapes.values())) * dtype.itemsize)
    with new_file(path, []) as (file, check):
        for name, shape in shapes.items():
            file.create_dataset(name, tuple(shape), dtype)
            if name in labels:
                file.create_dataset(labels[name], tuple(shape[:-1]), label_type(shape[-1]))
        for name in BESIDE:
            known = None if name in file else data.beside(name)  # an output may have the name
            if known is not None:
                file[name] = known[0]

        def put(name: str, where: tuple[slice, ...], part: Array) -> None:
            try:
                file[name][where] = part
                if name in labels:
                    file[labels[name]][where[: part.ndim - 1]] = part.argmax(-1)
                check()
            except OSError as e:  # told to all ranks, which wait for this one
                raise DataError(f"{path}: cannot write: {e.strerror or e}. Nothing was changed.") from e

        yield put


@contextmanager
def _npy(path: Path, shape: Sequence[int], dtype: np.dtype[Any]) -> Iterator[Put]:
    with _part(path, prod(shape) * dtype.itemsize) as part:
        out = np.lib.format.open_memmap(part, "w+", dtype, tuple(shape))
        yield out.__setitem__
        out.flush()


@contextmanager
def _part(path: Path, size: int) -> Iterator[Path]:
    check_room(path.resolve(), size)  # a full disk ends a process that writes to a memory map
    with beside(path, lambda reason: DataError(f"{path}: cannot write: {reason}. Nothing was changed.")) as part:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part


def _places(path: Path, data: Dataset, shape: Sequence[int], labels: bool) -> list[_Place]:
    """Where each sample lies."""
    try:
        import nibabel  # noqa: F401 - told before anything is computed
    except ImportError:
        raise DataError(f"{path}: writing it needs nibabel; `pip install lbpar[volumes]`.") from None
    spatial = tuple(shape[1:] if labels else shape[1:-1])
    if len(spatial) != 3 or spatial != data.sample_shape[:-1]:
        raise DataError(
            f"{path}: NIfTI takes volumes of the input's size {data.sample_shape[:-1]}, but the network's output is {spatial}; "
            "write .h5 or .npy."
        )
    same = np.array([[0, 1], [1, 1], [2, 1]], float)
    places: list[_Place] = []
    if isinstance(data, VolumeDataset):
        for f in map(look_volume, data.files):
            if f.affine is None or f.orientation is None:
                raise DataError(f"{f.path}: it does not say where it lies, which NIfTI needs; write .h5 or .npy.")
            places.append(_Place(stem(f.path), f.shape[:3], f.affine, f.orientation, f.space))
    elif isinstance(data, Hdf5Dataset):
        beside_x = data.beside("affine", "size", "files")
        if beside_x is None:
            raise DataError(
                f"{data.name}: it has no `affine`, `size` and `files`, which NIfTI needs; write .h5 or .npy."
            )
        for affine, size, name in zip(*beside_x, strict=True):
            places.append(_Place(stem(Path(name.decode())), tuple(size.tolist()), affine, same))
    else:
        raise DataError(f"{path}: {data.name} do not say where they lie, which NIfTI needs; write .h5 or .npy.")
    if path.suffix and len(places) != 1:
        raise DataError(f"{path}: got {len(places)} volumes, expected one; give the name of a folder, without suffix.")
    names = [p.name for p in places]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: two volumes are called {twice}; predict them separately, or write .h5.")
    return places


@contextmanager
def _volumes(path: Path, places: list[_Place], channels: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[Put]:
    """A NIfTI file per sample; samples come one after the other."""
    names = [path] if path.suffix else [path / f"{p.name}.nii.gz" for p in places]
    with ExitStack() as open_one:
        now: int = -1
        views: Any = None

        def put(where: tuple[slice, ...], part: Array) -> None:
            nonlocal now, views
            rows, *inner = where
            first = inner[0].start if inner else 0
            for sample, values in enumerate(part.reshape(len(part), *part.shape[1:4], *channels), rows.start):
                if sample != now:
                    open_one.pop_all().close()
                    now, views = sample, open_one.enter_context(_volume(names[sample], places[sample], channels, dtype))
                depth, height, width = places[sample].size
                last = min(first + len(values), depth)
                views[first:last] = values[: max(0, last - first), :height, :width]

        yield put


@contextmanager
def _volume(path: Path, place: _Place, channels: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[Array]:
    """The values of a new file, in the order RAS+, whatever order the file has."""
    import nibabel
    from nibabel.orientations import apply_orientation, inv_ornt_aff

    own = tuple(place.size[int(axis)] for axis in place.orientation[:, 0])
    affine = place.affine @ np.linalg.inv(inv_ornt_aff(place.orientation, own))
    header = nibabel.Nifti1Header()
    header.set_data_dtype(dtype)
    header.set_data_shape((*own, *channels))
    header.set_zooms((*np.sqrt((affine[:3, :3] ** 2).sum(axis=0)), *(1.0 for _ in channels)))
    header.set_xyzt_units("mm")
    header.set_qform(affine, place.space or "scanner")
    header.set_sform(affine, place.space or "scanner")
    if not np.allclose(header.get_qform(), affine, rtol=1e-4, atol=1e-3):  # a quaternion has no shear
        header["qform_code"] = 0
    header.set_slope_inter(1, 0)
    header.set_data_offset(_HEADER)
    size = _HEADER + prod((*own, *channels)) * dtype.itemsize
    with _part(path, size) as part:
        raw = part.with_name(f"{part.name}.raw") if path.suffix == ".gz" else part
        try:
            with raw.open("wb") as file:
                file.write(header.binaryblock)
                file.truncate(size)
            values = np.memmap(raw, dtype, "r+", _HEADER, (*own, *channels), order="F")
            yield apply_orientation(values, place.orientation)  # views only
            values.flush()
            if raw != part:
                with raw.open("rb") as source, gzip.open(part, "wb", compresslevel=4) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
        finally:
            if raw != part:
                with suppress(OSError):
                    os.unlink(raw)
