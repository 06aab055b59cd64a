"""AlexNet: the two-tower original (Krizhevsky et al. 2012) and the one-tower form (Krizhevsky 2014) that torchvision has."""

from __future__ import annotations

from typing import Annotated

from lbpar.config.section import Flag, Shape
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.models.parts import Classes, Width, about, scaled

# Index in `features`, filters of (one tower, two towers), kernel, padding, groups of the two-tower form, pooled after.
LAYERS = (
    (0, (64, 96), 11, (2, 0), 1, True),
    (3, (192, 256), 5, (2, 2), 2, True),
    (6, (384, 384), 3, (1, 1), 1, False),
    (8, (256, 384), 3, (1, 1), 2, False),
    (10, (256, 256), 3, (1, 1), 2, True),
)


def alexnet(
    *,
    classes: Classes = 1000,
    input: Annotated[
        Shape | None, about("Sample shape (H, W, C); default: (224, 224, 3), (227, 227, 3) if grouped.")
    ] = None,
    width: Width = 1.0,
    grouped: Annotated[
        Flag, about("The original: two towers, as convolutions of two groups; 61 M parameters.")
    ] = False,
) -> Graph:
    """AlexNet without its local response normalisation; the classifier takes whatever size the last pool leaves."""
    two = int(grouped)
    g = GraphBuilder(input or ((227, 227, 3) if grouped else (224, 224, 3)), name="alexnet")
    x = g.input
    for i, filters, kernel, pads, groups, pooled in LAYERS:
        f = scaled(filters[two], width, multiple=1 + two)
        stride = 4 if i == 0 else 1
        x = g.conv(x, f, kernel, stride, pads[two], groups=groups if grouped else 1, name=f"features.{i}")
        x = g.relu(x, name=f"features.{i + 1}")
        if pooled:
            x = g.max_pool(x, 3, 2, name=f"features.{i + 2}")
    x = g.flatten(x, name="flatten")
    hidden = scaled(4096, width)
    x = g.linear(g.dropout(x, 0.5, name="classifier.0"), hidden, name="classifier.1")
    x = g.dropout(g.relu(x, name="classifier.2"), 0.5, name="classifier.3")
    x = g.relu(g.linear(x, hidden, name="classifier.4"), name="classifier.5")
    return g.build(g.linear(x, classes, name="classifier.6"))
