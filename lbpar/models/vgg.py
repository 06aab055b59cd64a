"""VGG (Simonyan and Zisserman 2015), with and without batch normalisation."""

from __future__ import annotations

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.models.parts import Classes, Image, Width, scaled

# Convolutions in each of the five stages; a pool ends a stage.
_DEPTHS = {"vgg11": (1, 1, 2, 2, 2), "vgg13": (2, 2, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}
VARIANTS = {f"{name}{bn}": (depths, bool(bn)) for name, depths in _DEPTHS.items() for bn in ("", "_bn")}


def vgg(variant: str, /, *, classes: Classes = 1000, input: Image = (224, 224, 3), width: Width = 1.0) -> Graph:
    """VGG; the classifier takes whatever size the last pool leaves, where torchvision averages or repeats to 7 x 7."""
    depths, normed = VARIANTS[variant]
    g = GraphBuilder(input, name=variant)
    x, i = g.input, 0
    for depth, filters in zip(depths, (64, 128, 256, 512, 512), strict=True):
        for _ in range(depth):
            x = g.conv(x, scaled(filters, width), 3, pad=1, name=f"features.{i}")
            if normed:
                i += 1
                x = g.norm(x, name=f"features.{i}")
            x = g.relu(x, name=f"features.{i + 1}")
            i += 2
        x = g.max_pool(x, 2, name=f"features.{i}")
        i += 1
    x = g.flatten(x, name="flatten")
    hidden = scaled(4096, width)
    for j in (0, 3):
        x = g.relu(g.linear(x, hidden, name=f"classifier.{j}"), name=f"classifier.{j + 1}")
        x = g.dropout(x, 0.5, name=f"classifier.{j + 2}")
    return g.build(g.linear(x, classes, name="classifier.6"))
