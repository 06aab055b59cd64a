"""HDF5 files that change as a whole or not at all: written beside their name, which they take when all is on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lbpar.config.paths import as_path
from lbpar.errors import DataError
from lbpar.hdf5_file import writing
from lbpar.text import human_bytes
from lbpar.whole_file import beside


@contextmanager
def new_file(path: Path, kept: list[str]) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A new HDF5 file that takes its name when the block ends well, and a check to call after each large part.

    Parameters
    ----------
    path : Path
        What is there already is replaced. From `destination`, as is ``kept``.
    kept : list of str
        Groups of the present file that are copied.

    Raises
    ------
    DataError
        The directory or file cannot be written, or the disk is full.
    """
    import h5py

    with beside(path, lambda reason: DataError(f"{path}: cannot write: {reason}. Nothing was changed.")) as part:
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(part) as (file, check):
            if kept:
                with h5py.File(path, "r", locking="best-effort") as old:
                    for name in kept:
                        old.copy(old[name], file, name)
                        check()
            yield file, check


def destination(path: str | Path, splits: list[str], overwrite: bool = False) -> tuple[Path, list[str]]:
    """Where splits may be written, and what stays of a file that is there.

    Parameters
    ----------
    path : str or Path
        Links are followed.
    splits : list of str
        Names of the groups to write; an empty one is the root of the file.
    overwrite : bool
        Replace splits of the same names, or all of a file whose root holds samples.

    Returns
    -------
    path : Path
    kept : list of str
        Groups of the present file that go into the new one.

    Raises
    ------
    DataError
        Something is there that would be lost, or that is no HDF5 file at all.
    """
    import h5py

    for name in splits:
        if "/" in name or name in (".", "..") or not name.isprintable():
            raise DataError(f"convert: got the split {name!r}, expected a name without slashes, as train or test.")
    path = as_path(path)
    try:
        path = path.resolve()
        exists, is_dir = path.exists(), path.is_dir()
    except OSError as e:
        raise DataError(f"{path}: cannot write: {e.strerror}.") from None
    except ValueError as e:
        raise DataError(f"{str(path)!r}: cannot be the name of a file: {e}.") from None
    if is_dir:
        raise DataError(f"{path}: it is a directory, expected the name of a file to write.")
    if not exists:
        return path, []
    try:
        if not path.is_file():
            raise OSError
        with h5py.File(path, "r", locking="best-effort") as old:
            held = {name: isinstance(old.get(name), h5py.Group) for name in old}
    except (OSError, KeyError, RuntimeError, ValueError):
        raise DataError(f"{path}: it exists and is no HDF5 file that can be read; give another name.") from None
    clash = [name for name in splits if name in held]
    if not held or (all(splits) and all(held.values()) and (overwrite or not clash)):
        return path, [name for name in held if name not in splits]
    if overwrite:
        return path, []
    what = ", ".join(f"/{name}" for name in clash or held)
    raise DataError(
        f"{path}: it exists and holds {what}; `--overwrite` (overwrite=True) replaces it, or give another name."
    )


def check_room(path: Path, size: int) -> None:
    """Refuse to start writing ``size`` bytes where so many are not free."""
    folder = next(p for p in path.parents if p.exists())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DataError(f"{path}: it would take {human_bytes(size)}, but {human_bytes(free)} are free in {folder}.")
