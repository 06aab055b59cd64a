"""LeNet-5 (LeCun et al. 1998) in its usual modern form: ReLU and max pooling, full connections between the channels."""

from __future__ import annotations

from lbpar.config.section import Count, Positive, Shape
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.models.parts import scaled


def lenet(*, classes: Count = 10, input: Shape = (28, 28, 1), width: Positive = 1.0) -> Graph:
    """LeNet-5.

    Parameters
    ----------
    classes : int
        Size of the output.
    input : tuple of int
        Sample shape (H, W, C); the first convolution is padded by 2, as 28 x 28 digits need it.
    width : float
        Factor of all channel counts.
    """
    g = GraphBuilder(input, name="lenet")
    x = g.relu(g.conv(g.input, scaled(6, width), 5, pad=2, name="conv1"), name="relu1")
    x = g.max_pool(x, 2, name="pool1")
    x = g.relu(g.conv(x, scaled(16, width), 5, name="conv2"), name="relu2")
    x = g.flatten(g.max_pool(x, 2, name="pool2"), name="flatten")
    x = g.relu(g.linear(x, scaled(120, width), name="fc1"), name="relu3")
    x = g.relu(g.linear(x, scaled(84, width), name="fc2"), name="relu4")
    return g.build(g.linear(x, classes, name="fc3"))
