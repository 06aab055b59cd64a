"""Say what an HDF5 dataset holds."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from lbpar.config.paths import as_path
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.data.targets import check_targets

_MOST = 20  # classes that are listed


def describe(path: str | Path, x: str = "x", y: str = "y") -> str:
    """Return a few lines about each split of a file; labels are checked on the way.

    Raises
    ------
    DataError
        What `Hdf5Dataset` refuses.
    """
    path = as_path(path)
    lines = [f"{path}: {os.path.getsize(path):,} bytes" if os.path.isfile(path) else f"{path}"]
    for split in splits_of(path, x):
        data = Hdf5Dataset(f"{path}:/{split}" if split else path, split, x=x, y=y)
        with closing(data):
            top = check_targets(data)
        lines.append(f"  /{split}: {len(data):,} samples {_shape(data.sample_shape)}, {data.storage}")
        if top < 0:
            lines.append(f"    targets {_shape(data.target_shape)}, real numbers")
            continue
        what = f"one per voxel {_shape(data.target_shape)}" if data.target_shape else "one per sample"
        classes = top + 1 if data.classes is None else data.classes
        lines.append(f"    labels {what}, {classes} classes")
        if not data.target_shape:
            counts = data.count_labels()
            first = range(min(classes, _MOST))
            shown = [f"{data.class_names[c]} {counts[c]}" if data.class_names else str(counts[c]) for c in first]
            lines.append(f"    samples per class {' '.join(shown)}{' ...' if classes > _MOST else ''}")
    return "\n".join(lines)


def splits_of(path: Path, x: str) -> list[str]:
    """Groups that hold samples, the usual ones first, and the root if it holds some."""
    import h5py

    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            found = [n for n, o in file.items() if isinstance(o, h5py.Group) and x in o]
            root = [""] if x in file or not found else []
    except (OSError, KeyError, RuntimeError, ValueError):
        return [""]  # opening it says what is wrong
    return root + sorted(found, key=lambda n: (n != "train", n != "test"))


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "()"
