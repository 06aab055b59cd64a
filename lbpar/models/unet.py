"""U-Nets: 2-D (Ronneberger et al. 2015) and 3-D (Çiçek et al. 2016), padded so that the output is as large as the input, whose size is any."""

from __future__ import annotations

from typing import Annotated

from lbpar.config.section import Count, Shape
from lbpar.errors import GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.models.parts import NORMS, Normalisation, Width, about, normalised, scaled

Channels = Annotated[Count, about("Channels of the output.")]
Depth = Annotated[Count, about("Number of poolings.")]


def unet2d(
    *,
    classes: Channels = 2,
    input: Annotated[Shape, about("Sample shape (H, W, C), of any size.")] = (256, 256, 1),
    width: Width = 1.0,
    depth: Depth = 4,
    norm: Annotated[
        Normalisation, about(f"After each 3 x 3 convolution, instead of a bias (the original has none): {NORMS}")
    ] = True,
) -> Graph:
    """2-D U-Net: 64 filters at full resolution, twice as many at each of ``depth`` levels below."""
    return _unet(2, classes, input, width, depth, norm)


def unet3d(
    *,
    classes: Channels = 3,
    input: Annotated[Shape, about("Sample shape (D, H, W, C), of any size.")] = (
        64,
        64,
        64,
        3,
    ),
    width: Width = 1.0,
    depth: Depth = 3,
    norm: Annotated[
        Normalisation, about(f"After each 3 x 3 x 3 convolution (which also has a bias, as the original): {NORMS}")
    ] = True,
) -> Graph:
    """3-D U-Net: the second convolution of a level doubles the channels, so that no pool is a bottleneck."""
    return _unet(3, classes, input, width, depth, norm)


def _unet(rank: int, classes: int, input: Shape, width: float, depth: int, norm: Normalisation) -> Graph:
    if len(input) != rank + 1:
        sizes = "[H, W, C]" if rank == 2 else "[D, H, W, C]"
        raise GraphError(f"input: got {list(input)}, expected {sizes}.")
    if depth > 30:
        raise GraphError(f"depth: got {depth}, expected at most 30 poolings.")
    flat = rank == 2
    levels = [(scaled((64 if flat else 32) * 2**i, width), scaled(64 * 2**i, width)) for i in range(depth + 1)]
    g = GraphBuilder(input, name=f"unet{rank}d")

    def pair(x: str, filters: tuple[int, int], at: str) -> str:
        for i, f in enumerate(filters, 1):
            x = g.conv(x, f, 3, pad=1, bias=not (flat and norm), name=f"{at}.conv{i}")
            if norm:
                x = normalised(g, x, norm, f"{at}.norm{i}")
            x = g.relu(x, name=f"{at}.relu{i}")
        return x

    x, skips, factors = g.input, [], []
    for i, filters in enumerate(levels[:-1], 1):
        x = pair(x, filters, f"down{i}")
        skips.append(x)
        # An odd extent is pooled to the half above it, an extent of 1 not at all.
        factors.append(tuple(min(2, e) for e in g.shape(x)[1:-1]))
        odd = any(e % f for e, f in zip(g.shape(x)[1:-1], factors[-1], strict=True))
        x = g.max_pool(x, factors[-1], ceil_mode=odd, name=f"down{i}.pool")
        if norm == "instance" and max(g.shape(x)[1:-1]) == 1:
            raise GraphError(
                f"depth: got {depth}, expected at most {i - 1} for {list(input)}: below, one position would be left, of which an "
                "instance norm makes nothing (as in PyTorch). Pool less, or take `norm: group`."
            )
    x = pair(x, levels[-1], "bottom")
    for i in range(depth, 0, -1):
        _, out = levels[i - 1]
        rise = out if flat else levels[i][1]
        x = g.conv_transpose(x, rise, factors[i - 1], factors[i - 1], bias=flat, name=f"up{i}.up")
        if g.shape(x)[1:-1] != g.shape(skips[i - 1])[1:-1]:
            x = g.fit([x, skips[i - 1]], name=f"up{i}.fit")
        x = g.concat([skips[i - 1], x], name=f"up{i}.concat")
        x = pair(x, (out, out), f"up{i}")
    return g.build(g.conv(x, classes, 1, name="head"))
