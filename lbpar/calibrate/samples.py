"""Small networks whose kernels, between them, show what an engine reaches on blocks of many shapes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from lbpar.graph.builder import OPS, GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Axes, Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Program

#: (batch, spatial extents, channels, filters, kernel) of convolutions: few and many channels, large and small maps.
CONVOLUTIONS = (
    (1, (4, 4), 4, 4, 3),
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
    (1, (8, 8)),
    (2, (64, 64)),
    (64, (64, 64)),
    (2, (1024, 1024)),
    (32, (1024, 1024)),
    (64, (512, 2048)),
    (1, (2048, 2048)),
    (2, (4096, 4096, 4096, 4096)),
)


#: (batch, spatial extents, channels) of ops without products: nothing but the start, in and out of caches, few and many channels.
PASSES = ((1, (4, 4), 8), (4, (32, 32), 32), (4, (16, 16, 16), 32))
MORE_PASSES = ((1, (192, 192), 8), (16, (8, 8), 64), (1, (256, 256), 16), (2, (128, 128), 64), (1, (48, 48, 48), 16))
#: Transposed convolutions, as `CONVOLUTIONS`.
TRANSPOSED = ((1, (64, 64), 8, 4, 2), (1, (16, 16), 64, 32, 2), (1, (16, 16, 16), 32, 16, 2))
#: Operations up to which a convolution is among the many samples.
MOST_WORK = 2e9

Convolution = tuple[int, tuple[int, ...], int, int, int]


def samples(more: bool = False) -> Iterator[Program]:
    """Steps of small networks; ``more`` for a calibration that may take a minute."""
    return (lower(graph, Plan(Grid(), {}), batch, input_grad=True) for graph, batch in networks(more))


def samples_by_turns(turns: int = 8) -> Iterator[Program]:
    """The few samples, in an order in which any first part has some of every kind: a measurement may have to end early."""
    found = list(networks())
    mixed = (network for i in range(turns) for network in found[i::turns])
    return (lower(graph, Plan(Grid(), {}), batch, input_grad=True) for graph, batch in mixed)


def own_programs(graph: Graph, batch: int, procs: int) -> Iterator[Program]:
    """Steps of a network with a loss, on one process and split along each loop in turn over some or all of so many; and whole with every
    kernel by itself, as they run where arrays move between them."""
    grid = Grid.of(procs)
    for fused in (True, False):
        yield lower(graph, Plan(grid, {}), batch, fused=fused)
    for axes in (grid.axes[: i + 1] for i in range(len(grid.axes))):
        for plan in plans_along(graph, batch, procs, axes):
            yield lower(graph, plan, batch)


def plans_along(graph: Graph, batch: int, procs: int, axes: Axes) -> Iterator[Plan]:
    """Plans that split all layers along one loop over some axes, for each loop that a layer has."""
    ops = {n.name: n.op.loops(graph.input_shapes(n.name, batch)) for n in graph.ops}
    for loop in dict.fromkeys(loop for loops in ops.values() for loop in loops):
        yield Plan(Grid.of(procs), {name: {loop: axes} for name, loops in ops.items() if loop in loops})


def networks(more: bool = False) -> Iterator[tuple[Graph, int]]:
    """Small networks with a loss, and the batch of each."""
    for batch, spatial, channels, filters, kernel in (*CONVOLUTIONS, *(_many() if more else ())):
        g = GraphBuilder((*spatial, channels), name="sample")
        x = g.conv(g.input, filters, kernel, pad=kernel // 2, bias=False)
        yield _ended(g, x), batch
    for batch, spatial, channels, filters, kernel in TRANSPOSED:
        g = GraphBuilder((*spatial, channels), name="sample")
        yield _ended(g, g.conv_transpose(g.input, filters, kernel, stride=kernel, bias=False)), batch
    for batch, (channels, *widths) in LINEAR:
        g = GraphBuilder((channels,), name="sample")
        x = g.input
        for features in widths:
            x = g.linear(x, features)
        yield g.build(x).with_loss(CrossEntropy()), batch
    for batch, spatial, channels in (*PASSES, *(MORE_PASSES if more else ())):
        yield _fused((*spatial, channels)), batch
        for kind, op in OPS.items():
            if op.sample is not None:
                g = GraphBuilder((*spatial, channels), name="sample")
                yield _ended(g, g.layer(kind, [g.input] * 2 if op.options.joins else g.input, **op.sample)), batch
    for side, classes in ((2, 4), (64, 8)):  # losses of many positions
        g = GraphBuilder((side, side, classes), name="sample")
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


def _fused(shape: tuple[int, ...]) -> Graph:
    """Layers that run fused with their neighbours."""
    g = GraphBuilder(shape, name="sample")
    y = g.relu(g.norm(g.norm(g.input)))
    return _ended(g, g.relu(g.add([g.norm(y), y])))


def _ended(g: GraphBuilder, x: str) -> Graph:
    return g.build(g.global_avg_pool(x)).with_loss(CrossEntropy())
