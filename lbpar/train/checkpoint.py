"""Checkpoints: whole tensors in one HDF5 file, written and read block by block.

    checkpoints/step-000123/tensors.h5    one dataset per tensor, in global shape, with a checksum per chunk
    checkpoints/step-000123/meta.json     step, counters, sampler position, ...; also the size of tensors.h5

The files know nothing of the grid that wrote them, so any other grid reads its own blocks. No process ever holds a
whole tensor: the writer takes one block at a time, a reader its own hyperslabs. A checkpoint appears under its name
only when complete (written beside it, flushed to disk, renamed); a file that was cut off or damaged afterwards is
recognised when opened or read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lbpar.errors import CheckpointError
from lbpar.layout.runs import Box, box_shape, box_size
from lbpar.train.boxes import box_fits, slabs

Block = tuple[str, Box, NDArray[Any]]

FORMAT = 1
CHUNK_BYTES = 1 << 20
CACHE_BYTES = 16 << 20  # per open tensor; must hold the chunks that a block with many runs keeps coming back to

_NAME = re.compile(r"step-(\d+)")
_TENSORS, _META = "tensors.h5", "meta.json"
# What HDF5 and the file system raise for damaged files, full disks and missing rights.
_FAILURES = (OSError, RuntimeError, KeyError, ValueError, TypeError)


def checkpoint_path(directory: str | os.PathLike[str], step: int) -> Path:
    """Where the checkpoint of a step lies: ``directory/step-000123``."""
    return Path(directory) / f"step-{step:06d}"


def list_checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """All checkpoints of a directory, oldest first; empty if the directory does not exist."""
    try:
        entries = list(Path(directory).iterdir())
    except OSError:
        return []
    found = [(int(match[1]), path) for path in entries if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found)]


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint of a directory, or None."""
    found = list_checkpoints(directory)
    return found[-1] if found else None


def prune(directory: str | os.PathLike[str], keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints, and what interrupted writers left behind. One process only."""
    for path in list_checkpoints(directory)[: -keep or None]:
        doomed = path.with_name(f".old-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)  # it vanishes at once, never half
    for path in Path(directory).glob(".*-step-*"):
        shutil.rmtree(path, ignore_errors=True)


def write_checkpoint(
    path: str | os.PathLike[str],
    tensors: Mapping[str, tuple[tuple[int, ...], DTypeLike]],
    blocks: Iterable[Block],
    meta: Mapping[str, Any],
) -> None:
    """Write a checkpoint; called by one process, which receives the others' blocks one after the other.

    Parameters
    ----------
    path : path
        From `checkpoint_path`; a checkpoint that exists there is replaced.
    tensors : mapping from name to (global shape, dtype)
        Everything the checkpoint holds. Any names will do, also ``w`` beside ``w/momentum``.
    blocks : iterable of (name, box, array)
        Blocks that together cover each tensor exactly once, in any order; arrays of the box' shape and the tensor's
        dtype. Each array is done with when the next one is asked for.
    meta : mapping
        JSON values (integers of any size); comes back as ``Checkpoint.meta``.

    Raises
    ------
    CheckpointError
        The directory cannot be written (full, no rights), or a block has a wrong name, box, shape or dtype, or blocks
        are missing or doubled. Nothing new then lies at ``path``. Exceptions of ``blocks`` pass through likewise.
    """
    path = Path(path)
    part = path.with_name(f".part-{path.name}")
    try:
        _fresh_directory(part)
        size = _write_tensors(part / _TENSORS, tensors, blocks, path)
        _write_meta(part / _META, {"format": FORMAT, "tensors_bytes": size, "meta": dict(meta)}, path)
        _publish(part, path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


class Checkpoint:
    """An open checkpoint; a context manager. Any number of processes may have it open at a time.

    Attributes
    ----------
    path : Path
        Its directory.
    meta : dict
        As given to `write_checkpoint`.
    tensors : dict from name to (global shape, dtype)
        What it holds.
    """

    def __init__(self, path: Path, file: Any, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self._file = file
        self.tensors: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            unquote(key): (tuple(item.shape), item.dtype) for key, item in file.items()
        }

    def read(self, name: str, box: Box) -> NDArray[Any]:
        """A block of a tensor: C-contiguous array of the box' shape (it may be empty), in the stored dtype.

        Not collective: every process reads what it needs.

        Raises
        ------
        CheckpointError
            No such tensor, a box outside of it, or damaged data (names the next older checkpoint).
        """
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.path}: there is no tensor {name!r}; it holds {len(self.tensors)}: {_some(self.tensors)}. "
                "Resume with the network and optimizer that wrote it."
            )
        shape, dtype = self.tensors[name]
        if not box_fits(box, shape):
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has shape {shape}, a block {box} was asked for. "
                "Resume with the network that wrote it."
            )
        out = np.empty(box_shape(box), dtype)
        try:
            dataset = self._file[_key(name)]  # opened once: the cache of chunks goes with it
            for there, here in slabs(box, dataset.chunks):
                out[here] = dataset[there]
        except _FAILURES as error:
            raise _damaged(self.path, f"tensor {name!r} cannot be read: {error}") from error
        return out

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint for reading.

    Raises
    ------
    CheckpointError
        It is missing, cut off or damaged; the message names the next older checkpoint, if there is one.
    """
    import h5py

    path = Path(path)
    if not path.is_dir():
        raise _damaged(path, "there is no such checkpoint")
    try:
        meta = json.loads((path / _META).read_text(encoding="utf-8"))
        expected, version, size = int(meta["tensors_bytes"]), meta["format"], (path / _TENSORS).stat().st_size
        content = dict(meta["meta"])
    except _FAILURES as error:
        raise _damaged(path, f"it is incomplete: {error}") from error
    if version != FORMAT:
        raise CheckpointError(
            f"{path}: it has format {version}, expected {FORMAT}. Read it with the lbpar that wrote it."
        )
    if size != expected:
        raise _damaged(path, f"{_TENSORS} has {size} bytes, expected {expected}")
    try:
        return Checkpoint(
            path, h5py.File(path / _TENSORS, "r", locking="best-effort", rdcc_nbytes=CACHE_BYTES), content
        )
    except _FAILURES as error:
        raise _damaged(path, f"{_TENSORS} cannot be opened: {error}") from error


def _fresh_directory(part: Path) -> None:
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(part.parent, error) from error


def _write_tensors(
    file: Path, tensors: Mapping[str, tuple[tuple[int, ...], DTypeLike]], blocks: Iterable[Block], path: Path
) -> int:
    """Write the HDF5 file and flush it to disk; its size in bytes."""
    import h5py

    missing = {name: prod(shape) for name, (shape, _) in tensors.items()}
    stored: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    try:
        handle = h5py.File(file, "w", locking="best-effort", rdcc_nbytes=CACHE_BYTES)
    except _FAILURES as error:
        raise _unwritable(path, error) from error
    with _Closing(handle, path):
        for name, (shape, dtype) in tensors.items():
            stored[name] = (tuple(shape), np.dtype(dtype))
            _create(handle, name, *stored[name], path)
        for name, box, array in blocks:
            _check_block(path, stored, name, box, array)
            missing[name] -= box_size(box)
            _write_block(handle[_key(name)], box, array, path)
        for name, count in missing.items():
            if count:
                problem = f"lack {count} elements of" if count > 0 else f"give {-count} elements twice of"
                raise CheckpointError(f"{path}: the blocks {problem} tensor {name!r} of shape {stored[name][0]}.")
    try:
        _flush_to_disk(file)
        return file.stat().st_size
    except OSError as error:
        raise _unwritable(path, error) from error


class _Closing:
    """Closes an HDF5 file: a full disk may only show then, and a failure to close must not hide an earlier error."""

    def __init__(self, handle: Any, path: Path) -> None:
        self._handle = handle
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._handle.close()
        except _FAILURES as failure:
            if error is None:
                raise _unwritable(self._path, failure) from failure


def _create(handle: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], path: Path) -> None:
    # HDF5 can neither chunk nor check scalars and empty tensors; they hold one number or none.
    options = {"chunks": _chunk_shape(shape, dtype.itemsize), "fletcher32": True} if prod(shape) and shape else {}
    try:
        handle.create_dataset(_key(name), shape, dtype, **options)
    except _FAILURES as error:
        raise _unwritable(path, error) from error


def _key(name: str) -> str:
    """Name of a dataset: HDF5 would take a slash for a folder, and a folder cannot share its name with a tensor."""
    return name.replace("%", "%25").replace("/", "%2F")


def _chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Chunks of at most CHUNK_BYTES, whole in as many trailing dimensions as fit: blocks split mostly leading ones."""
    room = max(1, CHUNK_BYTES // itemsize)
    chunk = []
    for extent in reversed(shape):
        chunk.append(min(extent, room))
        room = max(1, room // chunk[-1])
    return tuple(reversed(chunk))


def _write_block(dataset: Any, box: Box, array: NDArray[Any], path: Path) -> None:
    try:
        for there, here in slabs(box, dataset.chunks):
            dataset[there] = array[here]
    except _FAILURES as error:
        raise _unwritable(path, error) from error


def _check_block(
    path: Path, stored: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], name: str, box: Box, array: NDArray[Any]
) -> None:
    if name not in stored:
        raise CheckpointError(f"{path}: got a block of {name!r}, expected one of {_some(stored)}.")
    shape, dtype = stored[name]
    if not box_fits(box, shape):
        raise CheckpointError(f"{path}: got block {box} of tensor {name!r}, expected one inside its shape {shape}.")
    if array.shape != box_shape(box) or array.dtype != dtype:
        raise CheckpointError(
            f"{path}: got an array of shape {array.shape} and {array.dtype} for block {box} of tensor {name!r}, "
            f"expected shape {box_shape(box)} and {dtype}."
        )


def _write_meta(file: Path, content: dict[str, Any], path: Path) -> None:
    try:
        text = json.dumps(content, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the metadata cannot be stored as JSON: {error}.") from error
    try:
        file.write_text(text, encoding="utf-8")
        _flush_to_disk(file)
    except OSError as error:
        raise _unwritable(path, error) from error


def _publish(part: Path, path: Path) -> None:
    """Give a complete checkpoint its name."""
    old = path.with_name(f".old-{path.name}")
    try:
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        part.rename(path)
        _flush_to_disk(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    shutil.rmtree(old, ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: the checkpoint cannot be written: {error}. Free space there, or choose another run.out."
    )


def _damaged(path: Path, reason: str) -> CheckpointError:
    match = _NAME.fullmatch(path.name)
    older = [p for p in list_checkpoints(path.parent) if match and int(p.name[5:]) < int(match[1])]
    remedy = (
        f"The next older one is {older[-1]}: delete {path} to resume from it." if older else "There is no older one."
    )
    return CheckpointError(f"{path}: {reason}. {remedy}")


def _some(names: Iterable[str], most: int = 5) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (", ..." if len(listed) > most else "")
