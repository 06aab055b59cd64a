"""Small networks for tests of prices and plans."""

from __future__ import annotations

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy


def mixed(size: int = 9, channels: int = 5) -> Graph:
    """Convolutions, norm, residual add, concat, pools, flatten and linear layers, on odd sizes."""
    g = GraphBuilder(input=(size, size + 2, 3))
    x = g.relu(g.norm(g.conv(g.input, channels, 3, pad=1, name="c1")))
    y = g.conv(x, channels, 3, pad=1, name="c2")
    x = g.add([x, y])
    x = g.concat([x, g.conv(x, 4, 1, name="c3")])
    x = g.max_pool(x, 3, stride=2, pad=1)
    x = g.relu(g.linear(g.flatten(x), 12, name="f1"))
    return g.build(g.linear(x, 6, name="f2")).with_loss(CrossEntropy())


def even(size: int = 8, channels: int = 8) -> Graph:
    """A residual network whose sizes are all powers of two."""
    g = GraphBuilder(input=(size, size, 4))
    x = g.relu(g.norm(g.conv(g.input, channels, 3, pad=1, bias=False, name="c1")))
    y = g.norm(g.conv(x, channels, 3, pad=1, bias=False, name="c2"))
    x = g.relu(g.add([x, y]))
    x = g.global_avg_pool(x)
    return g.build(g.linear(x, 8, name="fc")).with_loss(CrossEntropy())
