"""LeNet-5 (LeCun et al. 1998) in its usual modern form: ReLU and max pooling, full connections between the channels."""

from __future__ import annotations

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.models.parts import Classes, Image, Width, scaled


def lenet(*, classes: Classes = 10, input: Image = (28, 28, 1), width: Width = 1.0) -> Graph:
    """LeNet-5; the first convolution is padded by 2, as 28 x 28 digits need it."""
    g = GraphBuilder(input, name="lenet")
    x = g.relu(g.conv(g.input, scaled(6, width), 5, pad=2, name="conv1"), name="relu1")
    x = g.max_pool(x, 2, name="pool1")
    x = g.relu(g.conv(x, scaled(16, width), 5, name="conv2"), name="relu2")
    x = g.flatten(g.max_pool(x, 2, name="pool2"), name="flatten")
    x = g.relu(g.linear(x, scaled(120, width), name="fc1"), name="relu3")
    x = g.relu(g.linear(x, scaled(84, width), name="fc2"), name="relu4")
    return g.build(g.linear(x, classes, name="fc3"))
