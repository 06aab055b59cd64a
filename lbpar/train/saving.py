"""Checkpoints of a training run: every rank's blocks into one file, block by block, and back on any other grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.errors import CheckpointError
from lbpar.layout.layout import Layout
from lbpar.layout.runs import box_shape, box_size
from lbpar.runtime.optim.base import Optimizer
from lbpar.runtime.worker import Worker
from lbpar.train.checkpoint import Block, checkpoint_path, open_checkpoint, prune, write_checkpoint
from lbpar.transport.base import Transport

Array = Any


def save(directory: Path, worker: Worker, optimizer: Optimizer, step: int, meta: Mapping[str, Any], keep: int) -> None:
    """Write ``directory/step-<step>`` and keep the newest ``keep``. Collective over all ranks.

    Rank 0 writes; it receives the other ranks' blocks one at a time and never holds a whole tensor.
    """
    arrays, layouts = _everything(worker, optimizer)
    transport = worker.transport
    blocks = _blocks(arrays, layouts, transport)
    content = {**meta, "step": step, "optimizer": optimizer.counters(), "optimizer_name": optimizer.name}
    if transport.rank == 0:
        tensors = {name: (layouts[name].shape, a.dtype) for name, a in arrays.items()}
        write_checkpoint(checkpoint_path(directory, step), tensors, blocks, content)
        prune(directory, keep)
    else:
        for _ in blocks:
            pass
    transport.barrier()


def load(path: Path, worker: Worker, optimizer: Optimizer) -> dict[str, Any]:
    """Read a checkpoint into this rank's blocks, whatever grid wrote it; returns its metadata. Every rank reads its own.

    Raises
    ------
    CheckpointError
        It is damaged, or of another network or optimizer.
    """
    arrays, layouts = _everything(worker, optimizer)
    with open_checkpoint(path) as saved:
        meta = saved.meta
        _check_same(path, saved.tensors, layouts, meta["optimizer_name"], optimizer.name)
        blocks = {name: saved.read(name, layouts[name].box(worker.transport.rank)) for name in arrays}
    for name in worker.state:
        worker.state[name][...] = blocks.pop(name)
    optimizer.load_state_dict(blocks, meta["optimizer"])
    return meta


def _check_same(
    path: Path, saved: Mapping[str, tuple[Any, ...]], layouts: Mapping[str, Layout], theirs: str, ours: str
) -> None:
    if theirs != ours:
        raise CheckpointError(
            f"{path}: written with optimizer {theirs}, but this run has {ours}; resume with {theirs}."
        )
    for name in sorted({*saved, *layouts}):
        there = saved[name][0] if name in saved else "absent"
        here = layouts[name].shape if name in layouts else "absent"
        if there != here:
            raise CheckpointError(
                f"{path}: {name} is {there} in the checkpoint, but {here} in this run; "
                "resume with the network and optimizer that wrote it."
            )


def _everything(worker: Worker, optimizer: Optimizer) -> tuple[dict[str, Array], dict[str, Layout]]:
    arrays, layouts = dict(worker.state), dict(worker.layouts)
    for name, array in optimizer.state_dict().items():
        arrays[name], layouts[name] = array, worker.layouts[name.rpartition("/")[0]]
    return arrays, layouts


def _blocks(arrays: Mapping[str, Array], layouts: Mapping[str, Layout], transport: Transport) -> Iterator[Block]:
    """Each distinct block once: rank 0 gets it, others only send theirs when its turn comes."""
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
                    yield name, box, array
                continue
            sends = {0: np.ascontiguousarray(array).reshape(-1)} if transport.rank == rank else {}
            recvs = {rank: size} if transport.rank == 0 else {}
            with transport.counter.paused():
                arrived = transport.exchange(sends, recvs, array.dtype, grid.axes, f"checkpoint {name}").wait()
            if transport.rank == 0:
                yield name, box, arrived[rank].reshape(box_shape(box))
