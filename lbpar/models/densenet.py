"""Densely connected networks (Huang et al. 2017)."""

from __future__ import annotations

from typing import Annotated

from lbpar.config.section import Positive
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.models.parts import Classes, Image, about, conv_norm_relu, scaled

# Layers in each of the four dense blocks; all have growth 32 and a stem of 64 filters.
VARIANTS = {"densenet121": (6, 12, 24, 16), "densenet169": (6, 12, 32, 32), "densenet201": (6, 12, 48, 32)}


def densenet(
    variant: str,
    /,
    *,
    classes: Classes = 1000,
    input: Image = (224, 224, 3),
    width: Annotated[Positive, about("Factor of the growth and of the stem's filters.")] = 1.0,
) -> Graph:
    """A densely connected network."""
    g = GraphBuilder(input, name=variant)
    growth = scaled(32, width)
    at = "features."
    x = conv_norm_relu(g, g.input, scaled(64, width), 7, 2, 3, conv=at + "conv0", norm=at + "norm0", relu=at + "relu0")
    x = g.max_pool(x, 3, 2, 1, name="features.pool0")
    depths = VARIANTS[variant]
    for b, depth in enumerate(depths, 1):
        for layer in range(1, depth + 1):
            x = _layer(g, x, growth, f"features.denseblock{b}.denselayer{layer}")
        if b < len(depths):
            x = _transition(g, x, f"features.transition{b}")
    x = g.relu(g.norm(x, name="features.norm5"), name="relu")
    return g.build(g.linear(g.global_avg_pool(x, name="avgpool"), classes, name="classifier"))


def _layer(g: GraphBuilder, x: str, growth: int, at: str) -> str:
    y = g.relu(g.norm(x, name=f"{at}.norm1"), name=f"{at}.relu1")
    y = g.conv(y, 4 * growth, 1, bias=False, name=f"{at}.conv1")
    y = g.relu(g.norm(y, name=f"{at}.norm2"), name=f"{at}.relu2")
    y = g.conv(y, growth, 3, pad=1, bias=False, name=f"{at}.conv2")
    return g.concat([x, y], name=f"{at}.concat")


def _transition(g: GraphBuilder, x: str, at: str) -> str:
    y = g.relu(g.norm(x, name=f"{at}.norm"), name=f"{at}.relu")
    y = g.conv(y, g.shape(x)[-1] // 2, 1, bias=False, name=f"{at}.conv")
    return g.avg_pool(y, 2, name=f"{at}.pool")
