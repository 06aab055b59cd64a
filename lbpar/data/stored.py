"""Is everything there that a dataset declares? HDF5 reads as zeros what was never written or whose file is missing."""

from __future__ import annotations

import os
from math import prod
from typing import Any

from lbpar.errors import DataError

_DEEPEST = 16  # virtual datasets of virtual datasets


def check_stored(data: Any, where: str, depth: int = 0) -> None:
    """Refuse a dataset of which parts would be read as zeros.

    Costs a look at the index of its chunks, not at its values. Of a virtual dataset with unlimited or numbered sources
    (``%b``), only the files that it names outright are looked for.

    Parameters
    ----------
    data : h5py.Dataset
    where : str
        Opens the message.
    depth : int
        Datasets that were passed on the way here.

    Raises
    ------
    DataError
        Names what is missing: chunks, or the file or dataset that a virtual or external one refers to.
    """
    if data.is_virtual:
        _check_virtual(data, where, depth)
    elif data.external:
        _check_external(data, where)
    elif data.chunks:
        declared = prod(-(-n // c) for n, c in zip(data.shape, data.chunks, strict=True))
        _check_amount(data.id.get_num_chunks(), declared, "chunks", where)
    else:
        _check_amount(data.id.get_storage_size(), data.size * data.dtype.itemsize, "bytes", where)


def _check_amount(held: int, declared: int, unit: str, where: str) -> None:
    if held < declared:
        raise DataError(
            f"{where} declares {declared:,} {unit}, but {held:,} were ever written; the rest would be read as zeros. "
            "Write it again."
        )


def _check_external(data: Any, where: str) -> None:
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", _folders(data)[0])
    for name, offset, size in data.external:
        file = _find(name, [prefix])
        held, needed = os.path.getsize(file) if file else 0, offset + min(size, data.size * data.dtype.itemsize)
        if held < needed:
            state = f"has {held:,} bytes of {needed:,}" if file else "is missing"
            raise DataError(
                f"{where} keeps its values in the file '{name}', which {state}. Put it there, or copy the data."
            )


def _check_virtual(data: Any, where: str, depth: int) -> None:
    import h5py

    sources = data.virtual_sources()
    covered = sum(s.vspace.get_select_npoints() if _is_limited(s.vspace) else data.size for s in sources)
    _check_amount(covered, data.size, "values", where)
    folders = [*os.environ.get("HDF5_VDS_PREFIX", "").split(":"), *_folders(data), ""]
    for name, inside in sorted({(s.file_name, s.dset_name) for s in sources if "%b" not in s.file_name + s.dset_name}):
        part = f"{where} takes values from '{inside}' in the file '{name}'"
        file = data.file.filename if name == "." else _find(name, folders)
        if file is None or depth == _DEEPEST:
            raise DataError(
                f"{part}, which {'is missing' if file is None else 'leads in a circle'}. Copy the data into one file."
            )
        try:
            with h5py.File(file, "r", locking="best-effort") as other:
                found = other.get(inside)
                if not isinstance(found, h5py.Dataset):
                    raise DataError(f"{part}, which has no such dataset. Copy the data into one file.")
                check_stored(found, f"{part}, which", depth + 1)
        except (OSError, RuntimeError) as e:
            raise DataError(f"{part}, which cannot be read: {e}.") from None


def _is_limited(space: Any) -> bool:
    import h5py

    return not space.is_regular_hyperslab() or all(
        n != h5py.h5s.UNLIMITED for part in space.get_regular_hyperslab() for n in part
    )


def _folders(data: Any) -> list[str]:
    """Where HDF5 looks for other files: beside the file, and beside what a link to it points at."""
    return [os.path.dirname(path(data.file.filename)) for path in (os.path.abspath, os.path.realpath)]


def _find(name: str, folders: list[str]) -> str | None:
    last = os.path.basename(name) if os.path.isabs(name) else name
    return next((f for f in [name, *(os.path.join(folder, last) for folder in folders)] if os.path.isfile(f)), None)
