"""Whole tensors out of the ranks' blocks: a network's output for given samples, and its weights.

For a trained network in hand, of a size that one process can hold; training itself never builds a whole tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lbpar.data.dataset import Dataset
from lbpar.data.sampler import Sampler
from lbpar.errors import DataError
from lbpar.graph.graph import LOSS, TARGET, Graph
from lbpar.layout.layout import Layout
from lbpar.layout.runs import indices
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.runtime.executor import Executor
from lbpar.runtime.feeds import read_feeds
from lbpar.runtime.worker import QUIET, Worker
from lbpar.transport.base import Transport

Array = Any


def gather(layout: Layout, block: Array, transport: Transport) -> Array:
    """The whole tensor of which every rank holds a block, on all ranks. Collective over all ranks.

    Parameters
    ----------
    layout : Layout
        Partial values are summed.
    block : array
        This rank's.
    """
    out = np.zeros(layout.shape, block.dtype)
    own = {*layout.shard_axes, *layout.partial}
    with transport.counter.paused():
        blocks = transport.allgather_obj(block)
    for rank, part in enumerate(blocks):
        coords = layout.grid.coords(rank)
        if part.size and all(c == 0 for a, c in enumerate(coords) if a not in own):
            out[np.ix_(*(indices(runs) for runs in layout.box(rank)))] += part
    return out


def predict(worker: Worker, data: Dataset, batch: int) -> Array:
    """The network's output (before the loss), with running statistics and no dropout, on all ranks. Collective over all ranks.

    Each rank reads its blocks only of ``data``, the same samples on all ranks, so many as ``batch`` says at a time.

    Raises
    ------
    DataError
        The samples do not have the network's input shape.
    """
    whole = worker.graph
    graph = Graph(tuple(n for n in whole.nodes if n.name not in (LOSS, TARGET)), whole.output, whole.name)
    wanted = graph.shapes(1)["input"][1:]
    if data.sample_shape != wanted:
        raise DataError(f"predict: got samples of shape {data.sample_shape}, expected {wanted}, channels last.")
    plan = Plan(worker.plan.grid, {n: g for n, g in worker.plan.ops.items() if n in graph})
    out = np.empty((len(data), *graph.shapes(1)[graph.output][1:]), worker.engine.dtype)
    transport, engine = worker.transport, worker.engine
    executors: dict[int, Executor] = {}
    for samples in Sampler(len(data), batch, shuffle=False).batches(0) if len(data) else ():
        n = len(samples)
        if n not in executors:
            executors[n] = Executor(lower(graph, plan, n, training=False), engine, transport, worker.state)
        program = executors[n].program
        with np.errstate(**QUIET):
            executors[n].run(read_feeds(program, transport.rank, data, samples, np.dtype(engine.dtype)))
        out[samples] = gather(
            program.buffers[program.results["output"]].layout, executors[n].value("output"), transport
        )
    return out
