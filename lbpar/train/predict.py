"""A network's outputs for given samples, whole or in parts, out of the ranks' blocks.

Training itself never builds a whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lbpar.data.dataset import Dataset
from lbpar.data.patches.checks import check_one_size, check_size
from lbpar.data.pieces import cuts
from lbpar.data.sampler import Sampler
from lbpar.graph.graph import LOSS, Graph
from lbpar.layout.layout import Layout
from lbpar.program.lowering import lower
from lbpar.runtime.executor import Executor
from lbpar.runtime.feeds import read_feeds
from lbpar.runtime.worker import QUIET, Worker
from lbpar.transport.wholes import gather, gather_part

Array = Any
PART = 1 << 20
"""Elements of an output that come to one rank at a time."""


def output_shape(graph: Graph, output: str | None = None) -> tuple[int, ...]:
    """Of one sample; of the main output unless another one is named."""
    return tuple(graph.shapes(1)[output or graph.output][1:])


def check_shape(data: Dataset, graph: Graph, patches: bool = False) -> None:
    """Refuse samples of another shape than the network's inputs, or, where it sees patches, smaller ones."""
    for node in graph.samples:
        check_size(data.part(node.name), graph.shapes(1)[node.name][1:], patches)
    if patches:
        check_one_size(data, (node.name for node in graph.samples))


def predict(worker: Worker, data: Dataset, batch: int) -> dict[str, Array]:
    """Each output of the network (before the loss), with running statistics and no dropout, on all ranks. Collective over all ranks.

    Each rank reads its blocks only of ``data``, the same samples on all ranks, so many as ``batch`` says at a time.

    Raises
    ------
    DataError
        The samples do not have the network's input shape.
    """
    graph = worker.graph
    out = {name: np.empty((len(data), *output_shape(graph, name)), worker.engine.dtype) for name in graph.outputs}
    for samples, name, layout, block in _blocks(worker, data, batch):
        out[name][samples] = gather(layout, block, worker.transport)
    return out


def predict_parts(worker: Worker, data: Dataset, batch: int) -> Iterator[tuple[str, tuple[slice, ...], Array | None]]:
    """The same in order as (output, where, part), a few million bytes at a time: parts on rank 0, None elsewhere."""
    for samples, name, layout, block in _blocks(worker, data, batch):
        for where in cuts(layout.shape, PART):
            rows, *inner = (slice(*w.indices(n)) for w, n in zip(where, layout.shape, strict=False))
            at = int(samples[0])
            yield (
                name,
                (slice(at + rows.start, at + rows.stop), *inner),
                gather_part(layout, block, worker.transport, (rows, *inner)),
            )


def _blocks(worker: Worker, data: Dataset, batch: int) -> Iterator[tuple[Array, str, Layout, Array]]:
    """Samples, an output, and this rank's block of it for them."""
    whole = worker.graph
    trained = {
        LOSS,
        *(n.name for n in whole.targets),
        *(h for h, _ in whole.heads if all(c.name == LOSS for c in whole.consumers(h))),
    }
    graph = replace(whole, nodes=tuple(n for n in whole.nodes if n.name not in trained), heads=())
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
        for name in graph.outputs:
            result = graph.result(name)
            yield samples, name, program.buffers[program.results[result]].layout, executors[n].value(result)
