"""Checkpoints of a training run: every rank's blocks into one file, block by block, and back on any other grid."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.checkpoint.files import (
    Block,
    check_checkpoint,
    checkpoint_path,
    damaged,
    open_checkpoint,
    prune,
    write_checkpoint,
)
from lbpar.errors import CheckpointError
from lbpar.hdf5_file import uninterrupted
from lbpar.layout.layout import Layout
from lbpar.layout.runs import box_shape, box_size
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.worker import Worker
from lbpar.transport.together import check_alike, together

Array = Any
Later = Callable[[Callable[[], None]], object]


def save(
    directory: Path,
    worker: Worker,
    optimizer: Optimizer,
    step: int,
    meta: Mapping[str, Any],
    keep: int,
    later: Later | None = None,
) -> None:
    """Write ``directory/step-<step>``; keep the newest ``keep``, and the best if ``meta`` names one. Collective over all ranks.

    Rank 0 writes; it receives the other ranks' blocks one at a time and never holds a whole tensor. With ``later`` it takes copies of all
    (`copy_bytes`), and that is given the writing of them to call when it likes.
    """
    arrays, layouts = _everything(worker, optimizer)
    transport = worker.transport
    blocks = _blocks(arrays, layouts, worker)
    content = {**meta, "step": step, "optimizer": optimizer.counters(), "optimizer_name": optimizer.name}
    tensors = {name: (layouts[name].shape, a.dtype) for name, a in arrays.items()}

    def write(blocks: Iterable[Block]) -> None:
        write_checkpoint(checkpoint_path(directory, step), tensors, blocks, content)
        prune(directory, keep, (meta.get("best") or {}).get("step"))

    with together(transport):
        if transport.rank == 0 and later is None:
            try:
                write(blocks)
            except CheckpointError:
                deque(blocks, 0)  # the others send them in any case
                raise
        elif transport.rank == 0 and later is not None:
            later(partial(write, [(name, box, array.copy()) for name, box, array in blocks]))
        else:
            deque(blocks, 0)  # sends this rank's


def copy_bytes(worker: Worker, optimizer: Optimizer) -> int:
    """Bytes of the copy that `save` takes to write it later."""
    arrays, layouts = _everything(worker, optimizer)
    return sum(prod(layouts[name].shape) * array.itemsize for name, array in arrays.items())


def load(
    path: Path, worker: Worker, optimizer: Optimizer | None, check: Callable[[Mapping[str, Any]], object]
) -> dict[str, Any]:
    """Read a checkpoint into the ranks' blocks, whatever grid wrote it; returns its metadata. Collective over all ranks.

    Rank 0 reads all of it first and compares checksums, about a second per gigabyte; then every rank reads its own blocks.
    ``check`` may refuse the metadata. Without an optimizer, its state is left aside.

    Raises
    ------
    CheckpointError
        It is damaged, or of another network, type or optimizer. Nothing has changed then.
    ConfigError
        Ranks see different files.
    """
    arrays, layouts = _everything(worker, optimizer)
    transport = worker.transport
    with together(transport):
        if transport.rank == 0:
            check_checkpoint(path)
    meta: dict[str, Any] = {}
    with together(transport), uninterrupted(), open_checkpoint(path) as saved:
        meta = saved.meta
        require(path, meta, ("step", "optimizer", "optimizer_name"))
        check(meta)
        if optimizer is not None and meta["optimizer_name"] != optimizer.name:
            raise CheckpointError(
                f"{path}: written with optimizer {meta['optimizer_name']}, but this run has {optimizer.name}; "
                f"resume with {meta['optimizer_name']}."
            )
        here = {name: (layouts[name].shape, np.dtype(a.dtype)) for name, a in arrays.items()}
        state = {n for n in saved.tensors if optimizer is None and n not in here and n.rpartition("/")[0] in here}
        _check_same(path, {n: t for n, t in saved.tensors.items() if n not in state}, here)
        blocks = {name: saved.read(name, layouts[name].box(transport.rank)) for name in arrays}
    check_alike(transport, {f"{path}": meta})
    for name in worker.state:
        worker.engine.copy(worker.engine.from_host(blocks.pop(name)), out=worker.state[name])
    if optimizer is not None:
        optimizer.load_state_dict(blocks, meta["optimizer"])
    return meta


def require(path: Path, meta: Mapping[str, Any], fields: Iterable[str]) -> None:
    """Refuse metadata that lack a field."""
    if lacking := [field for field in fields if field not in meta]:
        raise damaged(path, f"its meta.json lacks {', '.join(lacking)}")


def _check_same(path: Path, saved: Mapping[str, tuple[Any, Any]], ours: Mapping[str, tuple[Any, Any]]) -> None:
    for name in sorted({*saved, *ours}):
        if saved.get(name) != ours.get(name):
            there, here = ("{} {}".format(*t[name]) if name in t else "absent" for t in (saved, ours))
            raise CheckpointError(
                f"{path}: {name} is {there} in the checkpoint, but {here} in this run; "
                "resume with the network, optimizer and engine.dtype that wrote it."
            )


def _everything(worker: Worker, optimizer: Optimizer | None) -> tuple[dict[str, Array], dict[str, Layout]]:
    arrays, layouts = dict(worker.state), dict(worker.layouts)
    for name, array in optimizer.state_dict().items() if optimizer is not None else ():
        arrays[name], layouts[name] = array, worker.layouts[name.rpartition("/")[0]]
    return arrays, layouts


def _blocks(arrays: Mapping[str, Array], layouts: Mapping[str, Layout], worker: Worker) -> Iterator[Block]:
    """Each distinct block once: rank 0 gets it, others only send theirs when its turn comes."""
    transport, engine = worker.transport, worker.engine
    grid = transport.grid
    for name, array in arrays.items():
        layout = layouts[name]
        for rank in grid.group(layout.shard_axes, 0):  # the ranks at coordinate 0 of every replicated axis
            box = layout.box(rank)
            size = box_size(box)
            if size == 0:
                continue
            if rank == 0:
                if transport.rank == 0:
                    yield name, box, engine.to_host(array)
                continue
            sends = {0: array.reshape(-1)} if transport.rank == rank else {}
            recvs = {rank: size} if transport.rank == 0 else {}
            with transport.counter.paused():
                arrived = transport.exchange(sends, recvs, array.dtype, grid.axes, f"checkpoint {name}").wait()
            if transport.rank == 0:
                yield name, box, engine.to_host(arrived[rank]).reshape(box_shape(box))
