"""Inception v3 (Szegedy et al. 2016), without the auxiliary classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lbpar.graph.arguments import Ints, Pads
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.models.parts import Classes, Image, Width, conv_norm_relu, scaled

# A convolution is (filters, kernel[, stride]); two of them in a list read the same and stand side by side at a branch's end.
Branches = dict[str, Sequence[Any]]
_ROW, _COLUMN = (1, 7), (7, 1)
_SPLIT = [(384, (1, 3)), (384, (3, 1))]

_REDUCTION_6: Branches = {"branch3x3": [(384, 3, 2)], "branch3x3dbl": [(64, 1), (96, 3), (96, 3, 2)]}
_REDUCTION_7: Branches = {
    "branch3x3": [(192, 1), (320, 3, 2)],
    "branch7x7x3": [(192, 1), (192, _ROW), (192, _COLUMN), (192, 3, 2)],
}
_BLOCK_5: Branches = {
    "branch1x1": [(64, 1)],
    "branch5x5": [(48, 1), (64, 5)],
    "branch3x3dbl": [(64, 1), (96, 3), (96, 3)],
}
_BLOCK_7: Branches = {
    "branch1x1": [(320, 1)],
    "branch3x3": [(384, 1), _SPLIT],
    "branch3x3dbl": [(448, 1), (384, 3), _SPLIT],
}


def _block_6(inner: int) -> Branches:
    """Seven rows and columns instead of squares, ``inner`` channels between them."""
    return {
        "branch1x1": [(192, 1)],
        "branch7x7": [(inner, 1), (inner, _ROW), (192, _COLUMN)],
        "branch7x7dbl": [(inner, 1), (inner, _COLUMN), (inner, _ROW), (inner, _COLUMN), (192, _ROW)],
    }


def inception_v3(*, classes: Classes = 1000, input: Image = (299, 299, 3), width: Width = 1.0) -> Graph:
    """Inception v3, without the auxiliary classifier (27,161,264 parameters with it)."""
    g = GraphBuilder(input, name="inception_v3")

    def unit(x: str, at: str, filters: int, kernel: Ints, stride: int = 1, pad: Pads = 0) -> str:
        names = {"conv": f"{at}.conv", "norm": f"{at}.bn", "relu": f"{at}.relu"}
        return conv_norm_relu(g, x, scaled(filters, width), kernel, stride, pad, eps=1e-3, **names)

    def in_branch(x: str, at: str, filters: int, kernel: Ints, stride: int = 1) -> str:
        """A convolution that keeps the size, or halves it."""
        sides = (kernel,) * 2 if isinstance(kernel, int) else kernel
        return unit(x, at, filters, kernel, stride, [k // 2 for k in sides] if stride == 1 else 0)

    def block(x: str, at: str, branches: Branches, pooled: int = 0) -> str:
        """Branches and a pool side by side; after an average pool comes a convolution of ``pooled`` filters."""
        parts = []
        for name, convs in branches.items():
            y = [x]
            for i, conv in enumerate(convs, 1):
                step = f"{at}.{name}_{i}" if len(convs) > 1 else f"{at}.{name}"
                halves = (
                    {step: conv} if isinstance(conv, tuple) else dict(zip((f"{step}a", f"{step}b"), conv, strict=True))
                )
                y = [in_branch(y[0], where, *each) for where, each in halves.items()]
            parts += y
        if pooled:
            pool = g.avg_pool(x, 3, 1, 1, count_include_pad=True, name=f"{at}.pool")
            return g.concat([*parts, unit(pool, f"{at}.branch_pool", pooled, 1)], name=f"{at}.concat")
        return g.concat([*parts, g.max_pool(x, 3, 2, name=f"{at}.pool")], name=f"{at}.concat")

    x = unit(g.input, "Conv2d_1a_3x3", 32, 3, stride=2)
    x = unit(x, "Conv2d_2a_3x3", 32, 3)
    x = unit(x, "Conv2d_2b_3x3", 64, 3, pad=1)
    x = g.max_pool(x, 3, 2, name="maxpool1")
    x = unit(x, "Conv2d_3b_1x1", 80, 1)
    x = unit(x, "Conv2d_4a_3x3", 192, 3)
    x = g.max_pool(x, 3, 2, name="maxpool2")
    for letter, pooled in zip("bcd", (32, 64, 64), strict=True):
        x = block(x, f"Mixed_5{letter}", _BLOCK_5, pooled)
    x = block(x, "Mixed_6a", _REDUCTION_6)
    for letter, inner in zip("bcde", (128, 160, 160, 192), strict=True):
        x = block(x, f"Mixed_6{letter}", _block_6(inner), 192)
    x = block(x, "Mixed_7a", _REDUCTION_7)
    for letter in "bc":
        x = block(x, f"Mixed_7{letter}", _BLOCK_7, 192)
    x = g.dropout(g.global_avg_pool(x, name="avgpool"), 0.5, name="dropout")
    return g.build(g.linear(x, classes, name="fc"))
