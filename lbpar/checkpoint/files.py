"""Checkpoints: whole tensors in one HDF5 file, written and read block by block.

    checkpoints/step-000123/tensors.h5    one dataset per tensor, in global shape, stored in one piece
    checkpoints/step-000123/meta.json     step, counters, sampler position, ...
    checkpoints/step-000123/SHA256SUMS    of both; `sha256sum -c SHA256SUMS` checks them as well

The files know nothing of the grid that wrote them, so any other grid reads its own blocks. No process ever holds a
whole tensor: the writer takes one block at a time, a reader its own hyperslabs. A checkpoint appears under its name
only when complete (written beside it, flushed to disk, renamed), and every byte of it is checked before any is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lbpar.data.box import check_box, pieces
from lbpar.errors import CheckpointError, DataError, LbparError
from lbpar.hdf5_file import uninterrupted, writing
from lbpar.layout.runs import Box, box_shape, box_size
from lbpar.whole_file import flush_to_disk

log = logging.getLogger(__name__)

Block = tuple[str, Box, NDArray[Any]]
Tensors = Mapping[str, tuple[tuple[int, ...], DTypeLike]]

FORMAT = 2

_NAME = re.compile(r"step-(\d+)")
_TENSORS, _META, _SUMS = "tensors.h5", "meta.json", "SHA256SUMS"
# What HDF5, JSON and the file system raise for files that are missing, damaged or of another kind.
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


def prune(directory: str | os.PathLike[str], keep: int, best: int | None = None) -> None:
    """Delete all but the newest ``keep`` checkpoints and that of step ``best``, and what interrupted writers left behind.

    One process only.
    """
    for path in list_checkpoints(directory)[: -keep or None]:
        if best is not None and path == checkpoint_path(directory, best):
            continue
        doomed = path.with_name(f".old-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        try:
            path.rename(doomed)  # it vanishes at once, never half
        except OSError as error:
            log.warning("%s: it is no longer needed, but cannot be removed: %s", path, error.strerror)
    for path in Path(directory).glob(".*-step-*"):
        shutil.rmtree(path, ignore_errors=True)


def write_checkpoint(
    path: str | os.PathLike[str],
    tensors: Tensors,
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
        are missing or doubled. Nothing new then lies at ``path``. Our own exceptions in ``blocks`` pass through likewise.
    """
    path = Path(path)
    part = path.with_name(f".part-{path.name}")
    try:
        text = json.dumps({"format": FORMAT, "name": path.name, "meta": dict(meta)}, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the metadata cannot be stored as JSON: {error}.") from error
    try:
        with uninterrupted():  # what is interrupted now is kept and found again
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            _write_tensors(part / _TENSORS, tensors, blocks, path)
            _write(part / _META, text.encode())
            _write(part / _SUMS, _sum(part / _TENSORS) + _sum(part / _META))
            _publish(part, path)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if not isinstance(error, OSError | RuntimeError) or isinstance(error, LbparError):
            raise
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise CheckpointError(
            f"{path}: the checkpoint cannot be written: {reason}. Free space there, or choose another run.out; "
            "older checkpoints are as they were."
        ) from error


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
        self.tensors: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for key, item in file.items():
            # No folder, no link into another file, no virtual or external dataset: these have no checksum.
            if not hasattr(item, "dtype") or item.file != file or (item.size and item.id.get_offset() is None):
                raise ValueError(f"{key!r} is not a tensor stored in one piece in {_TENSORS}")
            self.tensors[unquote(key)] = tuple(item.shape), item.dtype

    def read(self, name: str, box: Box) -> NDArray[Any]:
        """A block of a tensor: C-contiguous array of the box' shape (it may be empty), in the stored dtype.

        Not collective: every process reads what it needs.

        Raises
        ------
        CheckpointError
            No such tensor, a box outside of it, or damaged data (names the next older checkpoint).
        """
        dtype = _expect(self.path, self.tensors, name, box)
        out = np.empty(box_shape(box), dtype)
        try:
            dataset = self._file[_key(name)]
            for there, here in pieces(box):
                out[here] = dataset[there]
        except _FAILURES as error:
            raise damaged(self.path, f"tensor {name!r} cannot be read: {error}") from error
        return out

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


def check_checkpoint(path: str | os.PathLike[str]) -> None:
    """Read all of a checkpoint and compare it with its checksums. One process of a run does that for all.

    Raises
    ------
    CheckpointError
        It is missing, cut off or damaged; the message names the next older whole one, if there is one.
    """
    path = Path(path)
    if fault := _fault(path):
        raise damaged(path, fault)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open for reading a checkpoint that `check_checkpoint` found whole.

    Raises
    ------
    CheckpointError
        It cannot be opened.
    """
    import h5py

    path = Path(path)
    try:
        content = json.loads((path / _META).read_bytes())
        return Checkpoint(path, h5py.File(path / _TENSORS, "r", locking="best-effort"), dict(content["meta"]))
    except _FAILURES as error:
        raise damaged(path, f"it cannot be opened: {error}") from error


def damaged(path: Path, fault: str) -> CheckpointError:
    """The error for a checkpoint that cannot be used; reads the older ones, to name the next that can."""
    match, remedy = _NAME.fullmatch(path.name), "There is no older whole one."
    older = [p for p in list_checkpoints(path.parent) if match and int(p.name[5:]) < int(match[1])]
    if whole := next((p for p in reversed(older) if _fault(p) is None), None):
        remedy = f"The next older whole one is {whole}: delete {path} to resume from it."
    return CheckpointError(f"{path}: {fault}. {remedy}")


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None. All of them are read, and nothing is believed before its checksum."""
    if not path.is_dir():
        return "there is no such checkpoint"
    try:
        if not (path / _SUMS).exists() and json.loads((path / _META).read_bytes())["format"] == 1:
            return "it has format 1, which had no checksum of the whole; resume it with the lbpar that wrote it"
        sums, stored = {name: _sum(path / name) for name in (_TENSORS, _META)}, (path / _SUMS).read_bytes()
        if stored != b"".join(sums.values()):
            changed = [name for name, line in sums.items() if line not in stored] or [_SUMS]
            return f"damaged: {' and '.join(changed)} changed since it was written"
        content = json.loads((path / _META).read_bytes())
        if content["format"] != FORMAT:
            return f"it has format {content['format']}, expected {FORMAT}; resume it with the lbpar that wrote it"
        if content["name"] != path.name and _NAME.fullmatch(path.name):
            return f"damaged: it was written as {content['name']}, and renamed"
    except _FAILURES as error:
        return f"damaged: {error}"
    return None


def _sum(file: Path) -> bytes:
    """A line as `sha256sum` writes it."""
    with file.open("rb") as opened:
        return f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.name}\n".encode()


def _write_tensors(file: Path, tensors: Tensors, blocks: Iterable[Block], path: Path) -> None:
    missing = {name: prod(shape) for name, (shape, _) in tensors.items()}
    with writing(file) as (handle, check_disk):
        for name, (shape, dtype) in tensors.items():
            handle.create_dataset(_key(name), shape, dtype)
        for name, box, array in blocks:
            dtype = _expect(path, tensors, name, box)
            if array.shape != box_shape(box) or array.dtype != dtype:
                raise CheckpointError(
                    f"{path}: got an array of shape {array.shape} and {array.dtype} for block {box} of tensor {name!r}, "
                    f"expected shape {box_shape(box)} and {dtype}."
                )
            missing[name] -= box_size(box)
            dataset = handle[_key(name)]
            for there, here in pieces(box):
                dataset[there] = array[here]
            check_disk()
        for name, count in missing.items():
            if count:
                problem = f"lack {count} elements of" if count > 0 else f"give {-count} elements twice of"
                raise CheckpointError(f"{path}: the blocks {problem} tensor {name!r} of shape {tensors[name][0]}.")


def _expect(path: Path, tensors: Tensors, name: str, box: Box) -> np.dtype[Any]:
    """Type of a tensor that a checkpoint must hold, with a box inside its shape."""
    if name not in tensors:
        some = ", ".join([*tensors][:5]) + (", ..." if len(tensors) > 5 else "")
        raise CheckpointError(f"{path}: there is no tensor {name!r}, expected one of {len(tensors)}: {some}.")
    shape, dtype = tensors[name]
    try:
        check_box(box, shape, f"{path}: tensor {name!r}")
    except DataError as error:
        raise CheckpointError(str(error)) from None
    return np.dtype(dtype)


def _key(name: str) -> str:
    """Name of a dataset: HDF5 would take a slash for a folder, and a folder cannot share its name with a tensor."""
    return name.replace("%", "%25").replace("/", "%2F")


def _write(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    flush_to_disk(file)


def _publish(part: Path, path: Path) -> None:
    """Give a complete checkpoint its name."""
    flush_to_disk(part)
    old = path.with_name(f".old-{path.name}")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    part.rename(path)
    flush_to_disk(path.parent)
    shutil.rmtree(old, ignore_errors=True)
