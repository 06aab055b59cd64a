"""Inception v3 (Szegedy et al. 2016), without the auxiliary classifier."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from lbpar.config.section import Count, Positive, Shape
from lbpar.graph.arguments import Ints, Pads
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.models.parts import conv_norm_relu, scaled


class _Unit(Protocol):
    def __call__(self, x: str, at: str, filters: int, kernel: Ints, /, stride: Ints = 1, pad: Pads = 0) -> str: ...


# Kernel and padding of the pieces that a square convolution is factored into.
_ROW3, _COLUMN3 = ((1, 3), (0, 1)), ((3, 1), (1, 0))
_ROW7, _COLUMN7 = ((1, 7), (0, 3)), ((7, 1), (3, 0))


def inception_v3(*, classes: Count = 1000, input: Shape = (299, 299, 3), width: Positive = 1.0) -> Graph:
    """Inception v3, without the auxiliary classifier (27,161,264 parameters with it).

    Parameters
    ----------
    classes : int
        Size of the output.
    input : tuple of int
        Sample shape (H, W, C).
    width : float
        Factor of all channel counts.
    """
    g = GraphBuilder(input, name="inception_v3")
    unit: _Unit = partial(_unit, g, width)
    x = unit(g.input, "Conv2d_1a_3x3", 32, 3, stride=2)
    x = unit(x, "Conv2d_2a_3x3", 32, 3)
    x = unit(x, "Conv2d_2b_3x3", 64, 3, pad=1)
    x = g.max_pool(x, 3, 2, name="maxpool1")
    x = unit(x, "Conv2d_3b_1x1", 80, 1)
    x = unit(x, "Conv2d_4a_3x3", 192, 3)
    x = g.max_pool(x, 3, 2, name="maxpool2")
    for at, pooled in (("Mixed_5b", 32), ("Mixed_5c", 64), ("Mixed_5d", 64)):
        x = _square(g, unit, x, at, pooled)
    x = _first_reduction(g, unit, x, "Mixed_6a")
    for at, inner in (("Mixed_6b", 128), ("Mixed_6c", 160), ("Mixed_6d", 160), ("Mixed_6e", 192)):
        x = _factored(g, unit, x, at, inner)
    x = _second_reduction(g, unit, x, "Mixed_7a")
    for at in ("Mixed_7b", "Mixed_7c"):
        x = _spread(g, unit, x, at)
    x = g.dropout(g.global_avg_pool(x, name="avgpool"), 0.5, name="dropout")
    return g.build(g.linear(x, classes, name="fc"))


def _unit(
    g: GraphBuilder,
    width: float,
    x: str,
    at: str,
    filters: int,
    kernel: Ints,
    /,
    stride: Ints = 1,
    pad: Pads = 0,
) -> str:
    names = {"conv": f"{at}.conv", "norm": f"{at}.bn", "relu": f"{at}.relu"}
    return conv_norm_relu(g, x, scaled(filters, width), kernel, stride, pad, eps=1e-3, **names)


def _pooled(g: GraphBuilder, unit: _Unit, x: str, at: str, filters: int) -> str:
    x = g.avg_pool(x, 3, 1, 1, count_include_pad=True, name=f"{at}.pool")
    return unit(x, f"{at}.branch_pool", filters, 1)


def _square(g: GraphBuilder, unit: _Unit, x: str, at: str, pooled: int) -> str:
    a = unit(x, f"{at}.branch1x1", 64, 1)
    b = unit(x, f"{at}.branch5x5_1", 48, 1)
    b = unit(b, f"{at}.branch5x5_2", 64, 5, pad=2)
    c = unit(x, f"{at}.branch3x3dbl_1", 64, 1)
    c = unit(c, f"{at}.branch3x3dbl_2", 96, 3, pad=1)
    c = unit(c, f"{at}.branch3x3dbl_3", 96, 3, pad=1)
    return g.concat([a, b, c, _pooled(g, unit, x, at, pooled)], name=f"{at}.concat")


def _first_reduction(g: GraphBuilder, unit: _Unit, x: str, at: str) -> str:
    a = unit(x, f"{at}.branch3x3", 384, 3, stride=2)
    b = unit(x, f"{at}.branch3x3dbl_1", 64, 1)
    b = unit(b, f"{at}.branch3x3dbl_2", 96, 3, pad=1)
    b = unit(b, f"{at}.branch3x3dbl_3", 96, 3, stride=2)
    return g.concat([a, b, g.max_pool(x, 3, 2, name=f"{at}.pool")], name=f"{at}.concat")


def _factored(g: GraphBuilder, unit: _Unit, x: str, at: str, inner: int) -> str:
    a = unit(x, f"{at}.branch1x1", 192, 1)
    b = unit(x, f"{at}.branch7x7_1", inner, 1)
    for i, filters, (kernel, pad) in ((2, inner, _ROW7), (3, 192, _COLUMN7)):
        b = unit(b, f"{at}.branch7x7_{i}", filters, kernel, pad=pad)
    c = unit(x, f"{at}.branch7x7dbl_1", inner, 1)
    for i, filters, (kernel, pad) in ((2, inner, _COLUMN7), (3, inner, _ROW7), (4, inner, _COLUMN7), (5, 192, _ROW7)):
        c = unit(c, f"{at}.branch7x7dbl_{i}", filters, kernel, pad=pad)
    return g.concat([a, b, c, _pooled(g, unit, x, at, 192)], name=f"{at}.concat")


def _second_reduction(g: GraphBuilder, unit: _Unit, x: str, at: str) -> str:
    a = unit(x, f"{at}.branch3x3_1", 192, 1)
    a = unit(a, f"{at}.branch3x3_2", 320, 3, stride=2)
    b = unit(x, f"{at}.branch7x7x3_1", 192, 1)
    for i, (kernel, pad) in ((2, _ROW7), (3, _COLUMN7)):
        b = unit(b, f"{at}.branch7x7x3_{i}", 192, kernel, pad=pad)
    b = unit(b, f"{at}.branch7x7x3_4", 192, 3, stride=2)
    return g.concat([a, b, g.max_pool(x, 3, 2, name=f"{at}.pool")], name=f"{at}.concat")


def _spread(g: GraphBuilder, unit: _Unit, x: str, at: str) -> str:
    a = unit(x, f"{at}.branch1x1", 320, 1)
    b = unit(x, f"{at}.branch3x3_1", 384, 1)
    c = unit(x, f"{at}.branch3x3dbl_1", 448, 1)
    c = unit(c, f"{at}.branch3x3dbl_2", 384, 3, pad=1)
    parts = [a]
    for y, name in ((b, "branch3x3_2"), (c, "branch3x3dbl_3")):
        for letter, (kernel, pad) in (("a", _ROW3), ("b", _COLUMN3)):
            parts.append(unit(y, f"{at}.{name}{letter}", 384, kernel, pad=pad))
    return g.concat([*parts, _pooled(g, unit, x, at, 192)], name=f"{at}.concat")
