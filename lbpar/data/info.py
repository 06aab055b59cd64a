"""Say what an HDF5 dataset holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lbpar.config.paths import as_path
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.errors import DataError


def describe(path: str | Path, x: str = "x", y: str = "y") -> str:
    """Return a few lines about each split of a file; labels are checked on the way.

    Raises
    ------
    DataError
        What `Hdf5Dataset` refuses.
    """
    path = as_path(path)
    lines = [f"{path}: {path.stat().st_size:,} bytes" if path.is_file() else f"{path}"]
    for split in _splits(path):
        data = Hdf5Dataset(path, split, x=x, y=y)
        data.check_labels()
        lines.append(f"  /{split}: {len(data):,} samples {_shape(data.sample_shape)}, {data.storage}")
        if data.classes is None:
            lines.append(f"    targets {_shape(data.target_shape)}, real numbers")
            continue
        what = f"one per voxel {_shape(data.target_shape)}" if data.target_shape else "one per sample"
        lines.append(f"    labels {what}, {data.classes} classes")
        if not data.target_shape:
            labels = data.read_targets(np.arange(len(data)))
            counts = np.bincount(labels, minlength=data.classes)
            shown = " ".join(map(str, counts[:20])) + (" ..." if len(counts) > 20 else "")
            lines.append(f"    samples per class {shown}")
    return "\n".join(lines)


def _splits(path: Path) -> list[str]:
    import h5py

    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            found = [n for n, o in file.items() if isinstance(o, h5py.Group)]
            return [n for n in ("train", "test") if n in found] + [n for n in found if n not in ("train", "test")] or [
                ""
            ]
    except OSError:
        Hdf5Dataset(path)  # says better what is wrong
        raise DataError(f"{path}: cannot be read.") from None


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "()"
