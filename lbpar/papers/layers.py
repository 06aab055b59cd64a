"""A network's layers with weights as the papers' formulas need them."""

from __future__ import annotations

from math import prod

from lbpar.errors import Unsupported
from lbpar.graph.graph import Graph
from lbpar.papers.records import LayerRecord


def layer_records(graph: Graph) -> tuple[LayerRecord, ...]:
    """Records of all convolutions and linear layers, for one sample.

    Raises
    ------
    Unsupported
        A layer with three spatial dimensions: the formulas know two.
    """
    shapes = graph.shapes(1)
    out = []
    for node in graph.ops:
        if node.op.kind not in ("conv", "conv_transpose", "linear"):
            continue
        xs = graph.input_shapes(node.name, 1)
        weights = node.op.params(xs)["weight"].size
        x, y = xs[0][1:], shapes[node.name][1:]
        if len(x) == 1:
            out.append(LayerRecord(node.name, "fc", (1, 1, x[0]), (1, 1, y[0]), (1, 1), weights))
        elif len(x) == 3:
            kernel = node.op.kernel  # type: ignore[attr-defined]
            out.append(
                LayerRecord(node.name, "conv", (x[0], x[1], x[2]), (y[0], y[1], y[2]), (kernel[0], kernel[1]), weights)
            )
        else:
            raise Unsupported(
                f"{node.name}: the formulas of Gholami et al. know layers with two spatial dimensions; this one has {len(x) - 1} "
                f"({prod(x):,} inputs). Leave --cost out to plan this network."
            )
    return tuple(out)
