"""Checkpoints of a training run: every rank's blocks into one file, block by block, and back on any other grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lbpar.errors import CheckpointError
from lbpar.layout.layout import Layout
from lbpar.layout.runs import box_shape, box_size
from lbpar.train.checkpoint import Block, checkpoint_path, open_checkpoint, prune, write_checkpoint
from lbpar.train.optim.base import Optimizer
from lbpar.train.worker import Worker
from lbpar.transport.base import Transport

Array = Any


def save(directory: Path, worker: Worker, optimizer: Optimizer, step: int, meta: Mapping[str, Any], keep: int) -> None:
    """Write ``directory/step-<step>`` and keep the newest ``keep``. Collective over all ranks.

    Rank 0 writes; it receives the other ranks' blocks one at a time and never holds a whole tensor.
    """
    arrays, layouts = _everything(worker, optimizer)
    transport = worker.transport
    blocks = _blocks(arrays, layouts, transport)
    content = {**meta, "step": step, "optimizer": optimizer.counters()}
    if transport.rank == 0:
        tensors = {name: (layouts[name].shape, a.dtype) for name, a in arrays.items()}
        write_checkpoint(checkpoint_path(directory, step), tensors, blocks, content)
        prune(directory, keep)
    else:
        for _ in blocks:
            pass
    transport.barrier()


def load(path: Path, worker: Worker, optimizer: Optimizer) -> dict[str, Any]:
    """Read a checkpoint into this rank's blocks, whatever grid wrote it; returns its metadata. Every rank reads its own."""
    with open_checkpoint(path) as saved:
        for name, layout in worker.layouts.items():
            block = saved.read(name, layout.box(worker.transport.rank))
            if saved.tensors[name][0] != layout.shape:
                raise CheckpointError(
                    f"{path}: {name} has shape {saved.tensors[name][0]}, this network's has {layout.shape}."
                )
            worker.state[name][...] = block
        slots = {}
        for name in saved.tensors:
            param, _, slot = name.rpartition("/")
            if param in worker.layouts and slot in optimizer.slots:
                slots[name] = saved.read(name, worker.layouts[param].box(worker.transport.rank))
        meta = saved.meta
    optimizer.load_state_dict(slots, meta["optimizer"])
    return meta


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
