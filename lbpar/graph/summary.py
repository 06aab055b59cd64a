"""A network as a table: a row per op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lbpar.graph.graph import Graph
from lbpar.graph.loops import Shape


@dataclass(frozen=True)
class Row:
    """One op of the table.

    Parameters
    ----------
    name, op : str
        Name of the node and kind of op.
    shape : tuple of int
        Global shape of the output, (N, [D, H, W], C).
    parameters : int
        Trainable parameters.
    flops : int
        Floating-point operations of the forward pass in inference, for the whole batch; a multiply-add is two.
    """

    name: str
    op: str
    shape: Shape
    parameters: int
    flops: int


def summary(graph: Graph, batch: int = 1) -> list[Row]:
    """The ops of a network in order, without its inputs.

    Parameters
    ----------
    graph : Graph
        The network.
    batch : int
        Mini-batch size, for shapes and flops.
    """
    shapes = graph.shapes(batch)
    rows = []
    for node in graph.ops:
        xs = graph.input_shapes(node.name, batch)
        parameters = sum(p.size for p in node.op.params(xs).values() if p.kind != "statistic")
        flops = sum(k.flops for k in node.op.forward(xs, training=False))
        rows.append(Row(node.name, node.op.kind, shapes[node.name], parameters, flops))
    return rows


def format_summary(rows: Sequence[Row]) -> str:
    """The rows as aligned text with a line of totals; flops in units of 10**9."""
    cells = [("name", "op", "output", "parameters", "GFLOP")]
    cells += [
        (r.name, r.op, " x ".join(map(str, r.shape)) or "scalar", f"{r.parameters:,}", f"{r.flops / 1e9:.3f}")
        for r in rows
    ]
    total = sum(r.parameters for r in rows), sum(r.flops for r in rows) / 1e9
    cells.append(("total", "", "", f"{total[0]:,}", f"{total[1]:.3f}"))
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    lines = []
    for row in cells:
        left = [c.ljust(w) for c, w in zip(row[:3], widths[:3], strict=True)]
        right = [c.rjust(w) for c, w in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join(left + right))
    return "\n".join(lines)
