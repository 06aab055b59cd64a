"""A network for tests of programs."""

from __future__ import annotations

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES

BATCH = 8


def network(norm: bool = True) -> Graph:
    """A small residual network with every kind of parameter; extents divide by 4 where strategies split them."""
    g = GraphBuilder(input=(8, 8, 4))
    x = g.relu(g.conv(g.input, 8, 3, pad=1, name="conv1"), name="relu1")
    y = g.conv(x, 8, 3, pad=1, bias=False, name="conv2")
    y = g.norm(y, name="norm2") if norm else y
    x = g.relu(g.add([x, y], name="sum"), name="relu2")
    x = g.conv(x, 16, 3, stride=2, pad=1, groups=4, name="conv3")
    x = g.linear(g.flatten(g.max_pool(x, 2, name="pool"), name="flat"), 8, name="fc")
    return g.build(x).with_loss(LOSSES["cross_entropy"]())
