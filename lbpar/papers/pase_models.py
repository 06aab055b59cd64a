"""The networks of PaSE's public prototype, vertex by vertex as it builds them, with its departures from the originals.

AlexNet has 1024 outputs and no groups; Inception-v3 and ResNet-101 count no point-wise operation after a normalisation;
the residual sum carries one. ``pase-alexnet``, ``pase-inception-v3`` and ``pase-resnet101`` are their names here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from lbpar.errors import ConfigError
from lbpar.graph import graph
from lbpar.graph.loops import Shape
from lbpar.graph.op import Op
from lbpar.graph.ops.pooling import AvgPool, MaxPool
from lbpar.graph.ops.weighted import Conv
from lbpar.models.registry import build_model
from lbpar.papers import networks
from lbpar.papers.pase import Graph, Vertex

MODELS: dict[str, Callable[[], graph.Graph]] = {
    "pase-alexnet": partial(networks.alexnet, classes=1024),
    "pase-inception-v3": networks.inception_v3,
    "pase-resnet101": partial(build_model, "resnet101", input=(227, 227, 3)),
}


def pase_graph(name: str, batch: int) -> Graph:
    """The graph ``name`` for a mini-batch of ``batch`` samples."""
    return from_graph(networks.named("pase", MODELS, name), batch)


def from_graph(network: graph.Graph, batch: int) -> Graph:
    """PaSE's vertices of a network and the loss, for a mini-batch of ``batch`` samples; tensors are channels first."""
    if batch < 1:
        raise ConfigError(f"pase: got batch {batch}; expected at least 1")
    shapes = {n: (s[0], s[-1], *s[1:-1]) if len(s) == 4 else s for n, s in network.shapes(batch).items()}
    out = Graph()
    for node, inputs in networks.kept(network, ("relu", "dropout")):
        xs, y = tuple(shapes[i] for i in inputs), shapes[node.name]
        fused = any(reader.op.kind == "relu" for reader in network.consumers(node.name))
        if node.op.kind == "flatten":  # to a flat tensor and back to (b, features)
            flat = (prod(y),)
            out.add("ravel", Vertex("ravel", "bchw", xs[0], xs, "bchw", flat, "*"), inputs)
            out.add(node.name, Vertex("unravel", "bc", y, (flat,), "*", y, "bc"), ["ravel"])
        else:
            out.add(node.name, _vertex(node.op, xs, y, int(fused)), inputs)
    out.add("softmax", Vertex("softmax", "bn", y, (y,), "bn", y, "bn"), [node.name])
    return out


def _vertex(op: Op, xs: tuple[Shape, ...], y: Shape, fused: int) -> Vertex:
    x = xs[0]
    if isinstance(op, Conv):  # over the output's height and width, which stay whole
        return Vertex(
            "conv", "bchwrsn", (*x[:2], *y[2:], *op.kernel, y[1]), xs, "bchw", y, "bnhw", "hw", pointwise=fused
        )
    if isinstance(op, MaxPool | AvgPool):
        return Vertex("pool", "bchw", y, xs, "bchw", y, "bchw", window=op.kernel)
    if op.kind == "linear":
        return Vertex("linear", "bnc", (*y, x[1]), xs, "bc", y, "bn", pointwise=fused)
    if op.kind == "concat":  # of channels, which stay whole
        return Vertex("concat", "bchw", (x[0], 1, *x[2:]), xs, "bchw", y, "bchw", "c")
    if op.kind == "global_avg_pool":
        return Vertex("mean", "bchw", x, xs, "bchw", y, "bc")
    if op.kind == "norm":
        return Vertex("norm", "bchw", x, xs, "bchw", y, "bchw")
    return Vertex("add", "bchw", x, xs, "bchw", y, "bchw", pointwise=fused)
