"""Random small networks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lbpar.errors import GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES


def random_graph(rng: np.random.Generator) -> Graph:
    """Up to eight random ops on up to three live tensors, then a random loss."""
    rank = int(rng.choice([2, 2, 3]))
    shape = tuple(int(e) for e in rng.integers(3, 9 if rank == 2 else 6, rank))
    g = GraphBuilder(input=(*shape, int(rng.integers(1, 5))))
    live = [g.input]
    for _ in range(int(rng.integers(3, 9))):
        x = live[rng.integers(len(live))]
        try:
            live.append(_random_op(g, x, live, rng))
        except GraphError:  # the window does not fit what is left of the tensor: try another op
            continue
        live = live[-3:]
    x = live[-1]
    loss = str(rng.choice(["cross_entropy", "cross_entropy", "dice", "mse", "bce"]))
    if rng.random() < 0.6:
        x = g.linear(g.flatten(x) if rng.random() < 0.6 else g.global_avg_pool(x), int(rng.integers(2, 8)))
    smoothing = {"smoothing": 0.1} if loss == "cross_entropy" and rng.random() < 0.5 else {}
    return g.build(x).with_loss(LOSSES[loss](**smoothing))


def _random_op(g: GraphBuilder, x: str, live: Sequence[str], rng: np.random.Generator) -> str:
    channels, rank = g.shape(x)[-1], len(g.shape(x)) - 2
    kinds = ["conv", "conv", "conv", "conv_transpose", "max_pool", "avg_pool", "norm", "relu", "sigmoid", "leaky_relu"]
    kind = str(rng.choice([*kinds, "join", "join", "join", "dropout", "upsample", "block", "block"]))

    def ints(lo: int, hi: int) -> list[int]:
        return [int(v) for v in rng.integers(lo, hi, rank)]

    if kind in ("conv", "conv_transpose"):
        groups = int(rng.choice([n for n in (1, 1, 2, 3, channels) if channels % n == 0]))
        pad = [[int(a), int(b)] for a, b in rng.integers(0, 3, (rank, 2))]
        more = {"bias": bool(rng.random() < 0.7), "groups": groups}
        kernel, stride, dilation = ints(1, 5), ints(1, 4 if kind == "conv" else 3), ints(1, 3)
        y = getattr(g, kind)(x, groups * int(rng.integers(1, 4)), kernel, stride, pad, dilation, **more)
        if max(g.shape(y)[1:-1]) > 14:
            raise GraphError("too large for a quick test; the builder drops what is not read")
        return y
    if kind in ("max_pool", "avg_pool"):
        kernel = ints(1, 4)
        pad = [int(rng.integers(0, k // 2 + 1)) for k in kernel]
        more = {} if kind == "max_pool" else {"count_include_pad": bool(rng.random() < 0.5)}
        return getattr(g, kind)(x, kernel, ints(1, 4), pad, ceil_mode=bool(rng.random() < 0.5), **more)
    if kind == "join":
        same = [y for y in live if g.shape(y) == g.shape(x)]
        cat = [y for y in live if g.shape(y)[:-1] == g.shape(x)[:-1]]
        if rng.random() < 0.5:
            return g.concat([cat[i] for i in rng.integers(len(cat), size=int(rng.integers(1, 4)))])
        return getattr(g, str(rng.choice(["add", "multiply"])))([same[i] for i in rng.integers(len(same), size=2)])
    if kind == "dropout":
        return g.dropout(x, 0.3)
    if kind == "upsample":
        if max(g.shape(x)[1:-1]) > 6:
            raise GraphError("large enough")
        return g.upsample(x, ints(1, 3))
    if kind == "block":  # what kernels are fused for, in residual networks and before them
        y = g.norm(x) if rng.random() < 0.5 else g.conv(x, channels, 3, pad=1, bias=bool(rng.random() < 0.5))
        y = g.norm(y, affine=bool(rng.random() < 0.7)) if rng.random() < 0.5 else y
        return g.relu(g.add([y, x] if rng.random() < 0.5 else [x, y]) if rng.random() < 0.5 else y)
    if kind == "norm":
        return g.norm(x, affine=bool(rng.random() < 0.7))
    return getattr(g, kind)(x)


def residual_network(classes: int = 5) -> Graph:
    """A small ResNet: stem, a plain block, a strided block with projection, batch norm, dropout, and a classifier."""
    g = GraphBuilder(input=(9, 8, 3), name="small resnet")

    def conv_norm(x: str, filters: int, kernel: int, stride: int, name: str) -> str:
        y = g.conv(x, filters, kernel, stride, kernel // 2, bias=False, name=f"{name}.conv")
        return g.norm(y, name=f"{name}.norm")

    x = g.max_pool(g.relu(conv_norm(g.input, 6, 3, 1, "stem")), 3, 1, pad=1, name="pool")
    y = g.relu(conv_norm(x, 6, 3, 1, "block1.1"))
    x = g.relu(g.add([conv_norm(y, 6, 3, 1, "block1.2"), x]))
    y = g.relu(conv_norm(x, 8, 3, 2, "block2.1"))
    x = g.relu(g.add([conv_norm(y, 8, 3, 1, "block2.2"), conv_norm(x, 8, 1, 2, "block2.skip")]))
    x = g.dropout(g.global_avg_pool(x), 0.2, name="dropout")
    return g.build(g.linear(x, classes, name="fc")).with_loss(LOSSES["cross_entropy"](0.1))


def shared_network(norm: bool = True, groups: int = 1) -> Graph:
    """Layers that share parameters at two sizes of an image, side by side and at both ends: convolutions (one of them transposed),
    norms, slopes and matrices."""
    g = GraphBuilder(input=(8, 6, 4), name="shared")

    def block(x: str, first: str | None) -> str:
        name = "" if first is None else "again"
        y = g.conv(x, 4, 3, pad=1, groups=groups, name=f"conv{name}", share=first and "conv")
        y = g.norm(y, name=f"norm{name}", share=first and "norm") if norm else y
        return g.prelu(y, name=f"slope{name}", share=first and "slope")

    x = block(g.input, None)
    y = block(g.max_pool(x, 2, name="pool"), "conv")
    y = g.conv_transpose(y, 4, 3, 2, 1, groups=groups, output_pad=1, name="up", share="conv")
    x = g.conv(g.relu(g.add([x, y], name="sum"), name="relu"), 4, 3, 2, groups=groups, name="third", share="conv")
    x = g.relu(g.linear(g.global_avg_pool(x, name="mean"), 4, name="fc"), name="relu2")
    return g.build(g.linear(x, 4, name="last", share="fc")).with_loss(LOSSES["cross_entropy"](0.1))
