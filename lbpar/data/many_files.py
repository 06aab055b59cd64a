"""The samples of many HDF5 files as those of one, a file per sample or several in each; opened when they are read."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from lbpar.data.attributes import find_attribute
from lbpar.data.hdf5 import Hdf5Dataset
from lbpar.errors import DataError


class ManyFiles(Hdf5Dataset):
    """As `Hdf5Dataset`, of several files: their x and y one after the other, in the order of the list, or of sorted names.

    A virtual dataset in memory refers to them, so that HDF5 opens a file when one of its samples is read.

    Parameters
    ----------
    files : sequence of str
        Paths, or patterns as ``vol/*.h5``.
    split : str
        Group to use in each file that has it.
    options
        As for `Hdf5Dataset`.
    """

    def __init__(self, files: tuple[str, ...], split: str = "train", **options: Any) -> None:
        found, self._shown = found_files(files, f"data.{split}")
        self._files, self._split = [os.path.abspath(f) for f in found], split
        self._names = options.get("x", "x"), options.get("y", "y")
        self._parts: list[tuple[Any, ...]] = []
        super().__init__(Path(self._shown), "", **options)
        self.name = f"{self._shown} ({len(found)} files)"

    def _new_handle(self) -> Any:
        import h5py

        if not self._parts:
            self._parts = [self._look(f) for f in self._files]
        made = h5py.File(f"{uuid4()}.h5", "w", driver="core", backing_store=False)
        for k, name in enumerate(self._names):
            if name is None:
                continue
            shapes, dtype = [part[0][k] for part in self._parts], self._parts[0][1][k]
            layout, at = h5py.VirtualLayout((sum(s[0] for s in shapes), *shapes[0][1:]), dtype), 0
            for file, (_, _, inside, _), shape in zip(self._files, self._parts, shapes, strict=True):
                layout[at : at + shape[0]] = h5py.VirtualSource(file, f"{inside}/{name}", shape)
                at += shape[0]
            made.create_virtual_dataset(name, layout)
        for k, name in enumerate(self._names):
            if name is not None:
                made[name].attrs.update(self._parts[0][3][k])
        made.flush()
        image = made.id.get_file_image()
        made.close()
        # HDF5 opens files that a virtual dataset refers to as its own file was opened: to be written, each would be one process's alone.
        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_fapl_core(backing_store=False)
        access.set_file_image(image)
        access.set_file_locking(True, True)
        return h5py.File(h5py.h5f.open(f"{uuid4()}.h5".encode(), h5py.h5f.ACC_RDONLY, access))

    def _look(self, file: str) -> tuple[Any, ...]:
        """Shapes, types, group and attributes of one file, which must fit those of the first."""
        one = Hdf5Dataset(file, self._split, x=self._names[0], y=self._names[1])
        with one._errors():
            group = one._open()[one._x].parent
            data = [group[n] if n is not None else None for n in self._names]
            shapes, types = ([getattr(d, a, None) for d in data] for a in ("shape", "dtype"))
            wanted = (("scale", "mean", "std"), ("classes",))
            said = [
                {n: v for n in names if d is not None and (v := find_attribute(n, d, group)) is not None}
                for names, d in zip(wanted, data, strict=True)
            ]
            inside = group.name.rstrip("/")
        one.close()
        if self._parts_of_first:
            first = self._parts_of_first
            for what, got, want in (
                *(("shape", s and s[1:], f and f[1:]) for s, f in zip(shapes, first[0], strict=True)),
                *(("type", t, f) for t, f in zip(types, first[1], strict=True)),
                *(
                    (n, _plain(s.get(n)), _plain(f.get(n)))
                    for s, f in zip(said, first[3], strict=True)
                    for n in {*s, *f}
                ),
            ):
                if got != want:
                    raise DataError(
                        f"{file}: {what}: got {got}, expected {want} as in {self._files[0]}; files of one data set must be alike."
                    )
        else:
            self._parts_of_first = (shapes, types, inside, said)
        return shapes, types, inside, said

    _parts_of_first: tuple[Any, ...] = ()

    def _identity(self, xs: Any) -> tuple[Any, ...]:
        return tuple((s.st_dev, s.st_ino) for s in map(os.stat, self._files))


def found_files(files: Sequence[str], where: str) -> tuple[list[str], str]:
    """The files that paths and patterns name, and what to call them all; none may come twice."""
    found: list[str] = []
    for name in files:
        pattern = glob.has_magic(name) and not os.path.exists(name)  # a file may be called [1].nii
        found += sorted(glob.glob(name, recursive=True)) if pattern else [name]
    if not found:
        raise DataError(f"{where}: no file is called {', '.join(files)}.")
    double = next((f for i, f in enumerate(found) if f in found[:i]), None)
    if double is not None:
        raise DataError(f"{where}: {double} comes twice; name each file once.")
    return found, files[0] if len(files) == 1 else f"{len(files)} files, from {files[0]}"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
