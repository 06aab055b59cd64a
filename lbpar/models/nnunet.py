"""The U-Nets that nnU-Net trains (Isensee et al. 2021, 2024): strided convolutions, instance norms, and an encoder that is plain or residual."""

from __future__ import annotations

from typing import Annotated, Literal

from lbpar.config.section import Count, Flag, Shape
from lbpar.errors import GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.models.parts import Width, about, scaled

SMALLEST = 4
"""Extents are halved as long as so much is left."""
MOST_STAGES = 8


def nnunet(
    *,
    classes: Annotated[Count, about("Channels of the output.")] = 2,
    input: Annotated[Shape, about("Sample shape (H, W, C) or (D, H, W, C), of any size.")] = (128, 128, 128, 1),
    width: Width = 1.0,
    encoder: Annotated[
        Literal["plain", "residual"],
        about(
            "Two convolutions per stage, or residual blocks (1, 3, 4, 6, 6, 6, ...) and one convolution on the way up."
        ),
    ] = "plain",
    stages: Annotated[
        Count | None,
        about("Number of resolutions; default: until no extent can be halved without being less than 4, 8 at most."),
    ] = None,
    deep_supervision: Annotated[
        Flag,
        about(
            "Also train an output at each coarser resolution but the coarsest of the way up, with weights 1/2, 1/4, ..."
        ),
    ] = False,
) -> Graph:
    """nnU-Net's U-Net: 32 filters at full resolution, twice as many at each stage below, up to 320 (2-D: 512)."""
    rank = len(input) - 1
    if rank not in (2, 3):
        raise GraphError(f"input: got {list(input)}, expected [H, W, C] or [D, H, W, C].")
    strides = _strides(input[:-1], stages)
    filters = [scaled(min(32 * 2**i, 320 if rank == 3 else 512), width) for i in range(len(strides) + 1)]
    g, residual = GraphBuilder(input, name=f"nnunet {encoder}"), encoder == "residual"
    x, skips = g.input, []
    for i, f in enumerate(filters):
        at, stride = f"down{i + 1}", strides[i - 1] if i else (1,) * rank
        if residual:
            x = _stack(g, x, f, stride, 1, "stem") if not i else x
            for k in range((1, 3, 4, 6)[min(i, 3)]):
                x = _block(g, x, f, (1,) * rank if k else stride, f"{at}.block{k + 1}")
        else:
            x = _stack(g, x, f, stride, 2, at)
        skips.append(x)
    heads: dict[str, float] = {}
    for i in range(len(strides), 0, -1):
        skip, at = skips[i - 1], f"up{i}"
        x = g.conv_transpose(x, filters[i - 1], strides[i - 1], strides[i - 1], name=f"{at}.up")
        if g.shape(x)[1:-1] != g.shape(skip)[1:-1]:
            x = g.fit([x, skip], name=f"{at}.fit")
        x = _stack(g, g.concat([x, skip], name=f"{at}.concat"), filters[i - 1], (1,) * rank, 1 if residual else 2, at)
        if deep_supervision and 1 < i < len(strides):
            heads[g.conv(x, classes, 1, name=f"{at}.head")] = 0.5 ** (i - 1)
    return g.build(g.conv(x, classes, 1, name="head"), heads)


def _strides(space: tuple[int, ...], stages: int | None) -> list[tuple[int, ...]]:
    """By how much each stage but the first shrinks each dimension: odd extents to the half above."""
    out: list[tuple[int, ...]] = []
    while len(out) + 1 < (stages or MOST_STAGES):
        least = 2 if stages else 2 * SMALLEST
        stride = tuple(2 if e >= least else 1 for e in space)
        space = tuple(-(-e // s) for e, s in zip(space, stride, strict=True))
        if max(stride) == 1 or max(space) == 1:
            if stages:
                raise GraphError(
                    f"stages: got {stages}, expected at most {len(out) + 1}: below, one position would be left, of which an instance norm "
                    "makes nothing (as in PyTorch)."
                )
            break
        out.append(stride)
    return out


def _normed(
    g: GraphBuilder, x: str, filters: int, kernel: int, stride: tuple[int, ...], at: str, bias: bool = True
) -> str:
    x = g.conv(x, filters, kernel, stride, kernel // 2, bias=bias, name=f"{at}.conv")
    return g.instance_norm(x, name=f"{at}.norm")


def _stack(g: GraphBuilder, x: str, filters: int, stride: tuple[int, ...], convs: int, at: str) -> str:
    """Convolutions with norm and leaky ReLU; the first has the stride."""
    for k in range(convs):
        here = f"{at}.{k + 1}"
        x = g.leaky_relu(_normed(g, x, filters, 3, (1,) * len(stride) if k else stride, here), 0.01, name=f"{here}.act")
    return x


def _block(g: GraphBuilder, x: str, filters: int, stride: tuple[int, ...], at: str) -> str:
    """Two convolutions beside what comes in, which is averaged where they stride, and projected to other channels."""
    y = g.leaky_relu(_normed(g, x, filters, 3, stride, f"{at}.1"), 0.01, name=f"{at}.1.act")
    y = _normed(g, y, filters, 3, (1,) * len(stride), f"{at}.2")
    if max(stride) > 1:
        x = g.avg_pool(x, stride, stride, ceil_mode=True, name=f"{at}.pool")
    if g.shape(x)[-1] != filters:
        x = _normed(g, x, filters, 1, (1,) * len(stride), f"{at}.project", bias=False)
    return g.leaky_relu(g.add([y, x], name=f"{at}.add"), 0.01, name=f"{at}.act")
