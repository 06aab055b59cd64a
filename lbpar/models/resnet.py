"""Residual networks (He et al. 2016), with the stride on the 3 x 3 convolution of a bottleneck as torchvision has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lbpar.config.section import Shape
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.models.parts import Classes, Width, about, conv_norm_relu, scaled


@dataclass(frozen=True)
class Variant:
    """Blocks per stage, kind of block, and how much wider a bottleneck's inner convolutions are."""

    depths: tuple[int, int, int, int]
    bottleneck: bool = True
    inner: int = 1


VARIANTS = {
    "resnet18": Variant((2, 2, 2, 2), bottleneck=False),
    "resnet34": Variant((3, 4, 6, 3), bottleneck=False),
    "resnet50": Variant((3, 4, 6, 3)),
    "resnet101": Variant((3, 4, 23, 3)),
    "resnet152": Variant((3, 8, 36, 3)),
    "wide_resnet50_2": Variant((3, 4, 6, 3), inner=2),
}


def resnet(
    variant: str,
    /,
    *,
    classes: Classes = 1000,
    input: Annotated[Shape | None, about("Sample shape (H, W, C); default: (224, 224, 3), cifar (32, 32, 3).")] = None,
    width: Width = 1.0,
    stem: Annotated[
        Literal["imagenet", "cifar"],
        about("7 x 7 convolution of stride 2 and a pool, or, for small images, one 3 x 3 convolution of stride 1."),
    ] = "imagenet",
) -> Graph:
    """A residual network."""
    v = VARIANTS[variant]
    small = stem == "cifar"
    g = GraphBuilder(input or ((32, 32, 3) if small else (224, 224, 3)), name=variant)
    kernel, stride, pad = (3, 1, 1) if small else (7, 2, 3)
    x = conv_norm_relu(g, g.input, scaled(64, width), kernel, stride, pad, conv="conv1", norm="bn1", relu="relu")
    if not small:
        x = g.max_pool(x, 3, 2, 1, name="maxpool")
    for stage, depth in enumerate(v.depths):
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _block(g, x, v, scaled(64 * 2**stage, width), stride, f"layer{stage + 1}.{block}")
    return g.build(g.linear(g.global_avg_pool(x, name="avgpool"), classes, name="fc"))


def _block(g: GraphBuilder, x: str, v: Variant, planes: int, stride: int, at: str) -> str:
    inner = planes * v.inner
    # Filters, kernel, stride, padding of the block's convolutions; ReLU follows all but the last, which meets the shortcut.
    convs: tuple[tuple[int, int, int, int], ...]
    if v.bottleneck:
        convs = ((inner, 1, 1, 0), (inner, 3, stride, 1), (4 * planes, 1, 1, 0))
    else:
        convs = ((planes, 3, stride, 1), (planes, 3, 1, 1))
    filters = convs[-1][0]
    y = x
    for i, (f, kernel, s, pad) in enumerate(convs, 1):
        y = g.conv(y, f, kernel, s, pad, bias=False, name=f"{at}.conv{i}")
        y = g.norm(y, name=f"{at}.bn{i}")
        if i < len(convs):
            y = g.relu(y, name=f"{at}.relu{i}")
    if stride > 1 or g.shape(x)[-1] != filters:
        x = g.conv(x, filters, 1, stride, bias=False, name=f"{at}.downsample.0")
        x = g.norm(x, name=f"{at}.downsample.1")
    return g.relu(g.add([y, x], name=f"{at}.add"), name=f"{at}.relu{len(convs)}")
