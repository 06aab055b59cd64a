"""Small networks whose kernels, between them, show what an engine reaches on blocks of many shapes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from lbpar.graph.builder import OPS, GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy

#: (batch, spatial extents, channels, filters, kernel) of convolutions: few and many channels, large and small maps.
CONVOLUTIONS = (
    (1, (192, 192), 4, 4, 3),
    (1, (96, 96), 8, 16, 3),
    (4, (32, 32), 3, 16, 3),
    (4, (32, 32), 16, 16, 3),
    (2, (32, 32), 64, 64, 3),
    (8, (8, 8), 64, 64, 3),
    (1, (16, 16), 256, 256, 3),
    (1, (12, 12), 768, 768, 3),
    (8, (4, 4), 256, 256, 3),
    (8, (2, 2), 512, 512, 3),
    (1, (64, 64), 16, 64, 1),
    (4, (16, 16), 64, 256, 1),
    (8, (8, 8), 512, 128, 1),
    (1, (48, 48, 48), 1, 8, 3),
    (1, (24, 24, 24), 8, 16, 3),
    (1, (24, 24, 24), 32, 32, 3),
    (1, (12, 12, 12), 16, 32, 3),
    (2, (8, 8, 8), 64, 64, 3),
    (2, (4, 4, 4), 128, 128, 3),
)
#: Batch and widths of linear layers in a row; the last have more weights than caches hold.
LINEAR = (
    (2, (64, 64)),
    (64, (64, 64)),
    (2, (1024, 1024)),
    (32, (1024, 1024)),
    (64, (512, 2048)),
    (1, (2048, 2048)),
    (2, (4096, 4096, 4096, 4096)),
)


#: Operations up to which a convolution is among the many samples.
MOST_WORK = 2e9

Convolution = tuple[int, tuple[int, ...], int, int, int]


def samples(more: bool = False) -> Iterator[tuple[Graph, int]]:
    """Networks with a loss, and the batch of each; ``more`` for a calibration that may take a minute."""
    for batch, spatial, channels, filters, kernel in (*CONVOLUTIONS, *(_many() if more else ())):
        g = GraphBuilder((*spatial, channels), name="sample")
        x = g.conv(g.input, filters, kernel, pad=kernel // 2, bias=False)
        yield _ended(g, x), batch
    for batch, (channels, *widths) in LINEAR:
        g = GraphBuilder((channels,), name="sample")
        x = g.input
        for features in widths:
            x = g.linear(x, features)
        yield g.build(x).with_loss(CrossEntropy()), batch
    for spatial in ((32, 32), (16, 16, 16)):
        yield _fused(spatial), 4
        for kind, op in OPS.items():
            if op.sample is not None:
                g = GraphBuilder((*spatial, 32), name="sample")
                yield _ended(g, g.layer(kind, [g.input] * 2 if op.options.joins else g.input, **op.sample)), 4
    g = GraphBuilder((64, 64, 8), name="sample")  # a loss of many positions
    yield g.build(g.relu(g.input)).with_loss(CrossEntropy()), 4


def _many() -> Iterator[Convolution]:
    """Convolutions over the range of blocks that networks are cut into."""
    planes = (4, 16, 64, 256, 1024)
    volumes = (1, 8, 32, 128)
    for kernel, dims, sides, channels in (
        (1, 2, (8, 32, 128), planes),
        (3, 2, (4, 16, 64, 192), planes),
        (3, 3, (4, 12, 32), volumes),
    ):
        for side, c, f in product(sides, channels, channels):
            work = 2.0 * side**dims * c * f * kernel**dims
            if max(c, f) <= 16 * min(c, f) and work <= MOST_WORK:
                yield 1, (side,) * dims, c, f, kernel


def _fused(spatial: tuple[int, ...]) -> Graph:
    """Layers that run fused with their neighbours."""
    g = GraphBuilder((*spatial, 32), name="sample")
    y = g.relu(g.norm(g.norm(g.input)))
    return _ended(g, g.relu(g.add([g.norm(y), y])))


def _ended(g: GraphBuilder, x: str) -> Graph:
    return g.build(g.global_avg_pool(x)).with_loss(CrossEntropy())
