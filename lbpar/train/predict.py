"""Whole tensors, or parts of them, out of the ranks' blocks: a network's output for given samples, and its weights.

Training itself never builds a whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lbpar.data.dataset import Dataset
from lbpar.data.pieces import cuts
from lbpar.data.sampler import Sampler
from lbpar.errors import DataError
from lbpar.graph.graph import LOSS, TARGET, Graph
from lbpar.layout.layout import Layout
from lbpar.layout.runs import indices
from lbpar.program.lowering import lower
from lbpar.runtime.executor import Executor
from lbpar.runtime.feeds import read_feeds
from lbpar.runtime.worker import QUIET, Worker
from lbpar.transport.base import Transport

Array = Any
PART = 1 << 20
"""Elements of an output that come to one rank at a time."""


def gather(layout: Layout, block: Array, transport: Transport) -> Array:
    """The whole tensor of which every rank holds a block, on all ranks. Collective over all ranks.

    Parameters
    ----------
    layout : Layout
        Partial values are summed.
    block : array
        This rank's.
    """
    with transport.counter.paused():
        blocks = transport.allgather_obj(block)
    return _joined(layout, blocks, [(0, n) for n in layout.shape])


def gather_part(layout: Layout, block: Array, transport: Transport, where: Sequence[slice]) -> Array | None:
    """A part of such a tensor on rank 0, None elsewhere; no rank sends more than it holds of it. Collective over all ranks.

    Parameters
    ----------
    layout, block, transport
        As for `gather`.
    where : sequence of slice
        Of the first dimensions.
    """
    ends = [slice(*w.indices(n)) for w, n in zip(where, layout.shape, strict=False)]
    bounds = [*((e.start, e.stop) for e in ends), *((0, n) for n in layout.shape[len(ends) :])]
    own = [
        np.flatnonzero((i >= lo) & (i < hi))
        for i, (lo, hi) in zip(map(indices, layout.box(transport.rank)), bounds, strict=True)
    ]
    with transport.counter.paused():
        parts = transport.gather(block[np.ix_(*own)] if _speaks(layout, transport.rank) else block[:0])
    return None if parts is None else _joined(layout, parts, bounds)


def _speaks(layout: Layout, rank: int) -> bool:
    """Whether a rank is the first of those that hold the same."""
    own = {*layout.shard_axes, *layout.partial}
    return all(c == 0 for a, c in enumerate(layout.grid.coords(rank)) if a not in own)


def _joined(layout: Layout, parts: Sequence[Array], bounds: Sequence[tuple[int, int]]) -> Array:
    """The box inside bounds, out of what each rank holds of it."""
    out = np.zeros([hi - lo for lo, hi in bounds], parts[0].dtype)
    for rank, part in enumerate(parts):
        if part.size and _speaks(layout, rank):
            held = map(indices, layout.box(rank))
            out[np.ix_(*(i[(i >= lo) & (i < hi)] - lo for i, (lo, hi) in zip(held, bounds, strict=True)))] += part
    return out


def output_shape(graph: Graph) -> tuple[int, ...]:
    """Of one sample."""
    return tuple(graph.shapes(1)[graph.output][1:])


def check_shape(data: Dataset, graph: Graph) -> None:
    """Refuse samples of another shape than the network's input."""
    wanted = graph.shapes(1)["input"][1:]
    if data.sample_shape != wanted:
        raise DataError(f"predict: got samples of shape {data.sample_shape}, expected {wanted}, channels last.")


def predict(worker: Worker, data: Dataset, batch: int) -> Array:
    """The network's output (before the loss), with running statistics and no dropout, on all ranks. Collective over all ranks.

    Each rank reads its blocks only of ``data``, the same samples on all ranks, so many as ``batch`` says at a time.

    Raises
    ------
    DataError
        The samples do not have the network's input shape.
    """
    out = np.empty((len(data), *output_shape(worker.graph)), worker.engine.dtype)
    for samples, layout, block in _blocks(worker, data, batch):
        out[samples] = gather(layout, block, worker.transport)
    return out


def predict_parts(worker: Worker, data: Dataset, batch: int) -> Iterator[tuple[tuple[slice, ...], Array | None]]:
    """The same in order as (where, part), a few million bytes at a time: parts on rank 0, None elsewhere."""
    for samples, layout, block in _blocks(worker, data, batch):
        for where in cuts(layout.shape, PART):
            rows, *inner = (slice(*w.indices(n)) for w, n in zip(where, layout.shape, strict=False))
            at = int(samples[0])
            yield (
                (slice(at + rows.start, at + rows.stop), *inner),
                gather_part(layout, block, worker.transport, (rows, *inner)),
            )


def _blocks(worker: Worker, data: Dataset, batch: int) -> Iterator[tuple[Array, Layout, Array]]:
    """Samples, and this rank's block of the network's output for them."""
    whole = worker.graph
    trained = {LOSS, TARGET, *(h for h, _ in whole.heads if all(c.name == LOSS for c in whole.consumers(h)))}
    graph = Graph(tuple(n for n in whole.nodes if n.name not in trained), whole.output, whole.name)
    check_shape(data, graph)
    plan = replace(worker.plan, ops={n: g for n, g in worker.plan.ops.items() if n in graph})
    transport, engine = worker.transport, worker.engine
    executors: dict[int, Executor] = {}
    for samples in Sampler(len(data), batch, shuffle=False).batches(0) if len(data) else ():
        n = len(samples)
        if n not in executors:
            executors[n] = Executor(
                lower(graph, plan, n, training=False, rims=engine.rims), engine, transport, worker.state
            )
        program = executors[n].program
        with np.errstate(**QUIET):
            executors[n].run(read_feeds(program, transport.rank, data, samples, np.dtype(engine.dtype)))
        yield samples, program.buffers[program.results["output"]].layout, executors[n].value("output")
