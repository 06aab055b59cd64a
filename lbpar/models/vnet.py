"""V-Net (Milletari et al. 2016): a residual U-Net of 5 x 5 x 5 convolutions, whose inputs need not be divisible by anything."""

from __future__ import annotations

from typing import Annotated

from lbpar.config.section import Count, Shape
from lbpar.errors import GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.models.parts import NORMS, Normalisation, Width, about, normalised, scaled

CONVS = (1, 2, 3, 3, 3)
"""Convolutions of each resolution, on the way down and on the way up."""


def vnet(
    *,
    classes: Annotated[Count, about("Channels of the output.")] = 2,
    input: Annotated[Shape, about("Sample shape (D, H, W, C), of any size.")] = (64, 128, 128, 1),
    width: Width = 1.0,
    norm: Annotated[Normalisation, about(f"After each convolution (the original has none): {NORMS}")] = True,
) -> Graph:
    """V-Net: 16 to 256 filters at five resolutions, PReLU with a slope per channel."""
    if len(input) != 4:
        raise GraphError(f"input: got {list(input)}, expected [D, H, W, C].")
    g = GraphBuilder(input, name="vnet")
    filters = [scaled(16 * 2**i, width) for i in range(len(CONVS))]

    def normed(x: str, at: str) -> str:
        return normalised(g, x, norm, f"{at}.norm") if norm else x

    def stack(x: str, beside: str, f: int, convs: int, at: str) -> str:
        """Convolutions beside what comes in."""
        for k in range(1, convs + 1):
            x = normed(g.conv(x, f, 5, pad=2, name=f"{at}.conv{k}"), f"{at}.conv{k}")
            x = x if k == convs else g.prelu(x, per_channel=True, name=f"{at}.act{k}")
        return g.prelu(g.add([x, beside], name=f"{at}.add"), per_channel=True, name=f"{at}.act{convs}")

    channels = input[-1]
    if filters[0] % channels == 0:  # the input, repeated, stands beside the first convolution
        beside = g.concat([g.input] * (filters[0] // channels), name="down1.repeat")
    else:
        beside = g.conv(g.input, filters[0], 1, name="down1.project")
    x = stack(g.input, beside, filters[0], CONVS[0], "down1")
    skips, factors = [x], []
    for i in range(1, len(CONVS)):
        at, extents = f"down{i + 1}", g.shape(x)[1:-1]
        factors.append(tuple(min(2, e) for e in extents))
        odd = tuple((0, e % f) for e, f in zip(extents, factors[-1], strict=True))  # to the half above
        x = normed(g.conv(x, filters[i], factors[-1], factors[-1], odd, name=f"{at}.down"), f"{at}.down")
        x = g.prelu(x, per_channel=True, name=f"{at}.down.act")
        x = stack(x, x, filters[i], CONVS[i], at)
        skips.append(x)
    for i in range(len(CONVS) - 1, 0, -1):
        at, skip, factor = f"up{i}", skips[i - 1], factors[i - 1]
        x = normed(g.conv_transpose(x, filters[i - 1], factor, factor, name=f"{at}.up"), f"{at}.up")
        x = g.prelu(x, per_channel=True, name=f"{at}.up.act")
        if g.shape(x)[1:-1] != g.shape(skip)[1:-1]:
            x = g.fit([x, skip], name=f"{at}.fit")
        x = g.concat([x, skip], name=f"{at}.concat")
        x = stack(x, x, 2 * filters[i - 1], CONVS[i - 1], at)
    return g.build(g.conv(x, classes, 1, name="head"))
