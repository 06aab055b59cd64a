"""A network as a table: a row per op."""

from __future__ import annotations

from typing import Any

from lbpar.graph.graph import Graph


def summary(graph: Graph, batch: int = 1) -> list[dict[str, Any]]:
    """The ops of a network in order, without its inputs; `lbpar.tables.print_table` prints them.

    Parameters
    ----------
    graph : Graph
        The network.
    batch : int
        Mini-batch size, for shapes and operations.

    Returns
    -------
    list of dict
        With the keys ``name``, ``op``, ``output`` (the global shape), ``parameters`` (trainable ones; of
        those that layers share, with the first) and ``flops``: floating-point
        operations of the forward pass in inference, for the whole batch; a multiply-add is two.
    """
    shapes, rows = graph.shapes(batch), []
    for node in graph.ops:
        xs = graph.input_shapes(node.name, batch)
        own = {} if node.share is not None else node.op.params(xs)
        parameters = sum(p.size for p in own.values() if p.kind != "statistic")
        flops = sum(k.flops for k in node.op.forward(xs, training=False))
        row = {"name": node.name, "op": node.op.kind, "output": shapes[node.name]}
        rows.append(row | {"parameters": parameters, "flops": flops})
    return rows
