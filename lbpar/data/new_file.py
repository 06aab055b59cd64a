"""HDF5 files that change as a whole or not at all: written beside their name, which they take when all is on disk."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from lbpar.config.paths import as_path
from lbpar.errors import DataError
from lbpar.text import human_bytes


class NewFile:
    """A new HDF5 file, given its name at the end of the ``with`` block unless that ends by an exception.

    Parameters
    ----------
    path : str or Path
        What is there already is replaced; `destination` tells what that would be.

    Attributes
    ----------
    hdf5 : h5py.File
        To write to; call `check` now and then.

    Raises
    ------
    DataError
        The directory or file cannot be written, or the disk is full.
    """

    def __init__(self, path: str | Path) -> None:
        import h5py

        self._path = Path(path)
        self._part = self._path.with_name(f".{self._path.name[:200]}.{os.getpid()}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._sink = _Sink(self._part.open("w+b", buffering=0))
        except (OSError, ValueError) as e:
            raise self._unwritable(e) from None
        self.hdf5 = h5py.File(self._sink, "w")

    def keep(self, groups: list[str]) -> None:
        """Copy groups of the present file."""
        import h5py

        if groups:
            with h5py.File(self._path, "r", locking="best-effort") as old:
                for name in groups:
                    old.copy(old[name], self.hdf5, name)
                    self.check()

    def check(self) -> None:
        """Raise what went wrong since the last call."""
        if isinstance(self._sink.error, OSError):
            raise self._unwritable(self._sink.error) from None
        if self._sink.error is not None:
            raise self._sink.error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.hdf5.close()
            if error is None:
                self.check()
                os.fsync(self._sink.file.fileno())
                os.replace(self._part, self._path)
                _flush_directory(self._path.parent)
        except OSError as e:
            raise self._unwritable(e) from None
        finally:
            with suppress(OSError):
                self._sink.file.close()
            with suppress(OSError):  # it has its name
                self._part.unlink()

    def _unwritable(self, error: Exception) -> DataError:
        reason = getattr(error, "strerror", None) or error
        return DataError(f"{self._path}: cannot write: {reason}. Nothing was changed.")


class _Sink:
    """The file that HDF5 writes to: after the first failure it takes everything and stores nothing.

    HDF5 that cannot write while it closes a file tries once more when the process ends, and crashes. So it is never told
    of a failure (nor of an interrupt that comes while it writes); who writes asks for ``error``.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: BaseException | None = None
        self.read, self.readinto, self.seek, self.tell = file.read, file.readinto, file.seek, file.tell  # type: ignore[attr-defined]

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while self.error is None and rest:
                rest = rest[self.file.write(rest) :]
        except BaseException as e:  # noqa: BLE001 - raised by `NewFile.check`
            self.error = e
        return size

    def truncate(self, size: int) -> int:
        try:
            if self.error is None:
                self.file.truncate(size)
        except OSError as e:
            self.error = e
        return size

    def flush(self) -> None:
        """Nothing is held back."""


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
    except (OSError, RuntimeError):
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


def _flush_directory(folder: Path) -> None:
    """Make a renamed file outlast a crash of the machine."""
    with suppress(OSError):  # not every filesystem can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
