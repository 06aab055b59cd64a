"""Small networks that together use every op and every kernel, on odd sizes, in two and three dimensions; a short training run."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES, Loss
from lbpar.layout.grid import Grid
from lbpar.plan.strategies import strategy_plan
from lbpar.program.plan import Plan
from lbpar.program.random_plan import random_plan

BATCH, PROCS, SEED = 5, 6, 1
RANKS = (2, 4)
"""Numbers of real ranks that are tried."""

RUN: dict[str, Any] = {
    "model": {
        "input": [9, 8, 3],
        "layers": [
            {"op": "conv", "filters": 8, "kernel": 3, "pad": 1},
            {"op": "norm"},
            {"op": "relu"},
            {"op": "max_pool", "kernel": 2},
            {"op": "conv", "filters": 6, "kernel": 3, "pad": 1},
            {"op": "relu"},
            {"op": "flatten"},
            {"op": "linear", "features": 5},
        ],
    },
    "data": {"train": "synthetic", "samples": 32},
    "train": {"batch": 8, "epochs": 3, "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}},
    "parallel": {"strategy": "spatial"},
}
"""A run file of a short training."""


def networks() -> dict[str, Graph]:
    """Networks with their losses, which measure all that they can in an evaluation, by name."""
    return {
        "planes": _planes(),
        "volumes": _volumes(),
        "small blocks": _small_blocks(),
        "voxels": _voxels(),
        "weighed voxels": _weighed_voxels(),
        "vectors": _vectors("mse"),
        "flags": _vectors("bce"),
        "outputs": _outputs(),
    }


def tried_plans(graph: Graph, count: int) -> list[Plan]:
    """Random plans for one of them, so many, and, unless it is none, one that splits nothing, whose kernels are all fused, and one that
    splits space: convolutions then have interiors and rims."""
    random = Random(SEED)
    plans = [random_plan(graph, BATCH, PROCS, random) for _ in range(count)]
    return [Plan(Grid()), *plans, strategy_plan("spatial", graph, Grid.of(PROCS), BATCH)] if plans else []


def _loss(kind: str, **options: Any) -> Loss:
    loss = LOSSES[kind](**options)
    return replace(loss, metrics=tuple(loss.measures))


def _planes() -> Graph:
    g = GraphBuilder(input=(13, 11, 4), name="planes")
    a = g.relu(g.norm(g.conv(g.input, 8, 3, stride=2, pad=1, groups=2)))
    b = g.conv(a, 8, (3, 2), pad=[1, [0, 1]], dilation=1)
    x = g.concat([g.add([a, b]), g.conv(a, 8, 3, pad=1, groups=8, bias=False)])
    x = g.max_pool(x, 3, 2, pad=1)
    x = g.leaky_relu(g.conv_transpose(x, 6, 3, stride=2, pad=1, output_pad=1), 0.1)
    x = g.avg_pool(g.conv(x, 5, 3, dilation=2, pad=2), 3, 2, ceil_mode=True)
    x = g.dropout(g.flatten(x), 0.25)
    return g.build(g.linear(x, 7)).with_loss(_loss("cross_entropy", smoothing=0.1))


def _volumes() -> Graph:
    g = GraphBuilder(input=(7, 6, 5, 2), name="volumes")
    x = g.relu(g.norm(g.conv(g.input, 4, 3, pad=1)))
    x = g.max_pool(x, 2, ceil_mode=True)
    x = g.sigmoid(g.conv(x, 6, (3, 1, 2), pad=[1, 0, [1, 0]], groups=2))
    x = g.multiply([x, g.conv(x, 6, 1)])
    x = g.tanh(g.upsample(x, 2), 1.2)
    x = g.channel_shuffle(g.multiply([g.softmax(x), g.local_response_norm(x, 3)]), 3)
    return g.build(g.linear(g.global_avg_pool(x), 5)).with_loss(_loss("cross_entropy"))


def _small_blocks() -> Graph:
    """Kernels longer than what they run over, strides and dilations that leave out some of it, patches."""
    g = GraphBuilder(input=(4, 6, 3, 16), name="small blocks")
    x = g.relu(g.add([g.norm(g.conv(g.input, 16, 3, pad=1)), g.input]))
    x = g.relu(g.norm(g.conv(x, 24, (7, 5, 3), stride=(2, 1, 2), pad=[3, 2, 1])))
    x = g.relu(g.norm(g.conv(x, 16, 3, pad=2, dilation=2)))
    x = g.layer_norm(g.conv(x, 48, (5, 3, 3), pad=[2, 1, 1]))
    return g.build(g.linear(g.flatten(g.conv(x, 16, (1, 2, 2), stride=(1, 2, 2))), 5)).with_loss(_loss("cross_entropy"))


def _voxels() -> Graph:
    g = GraphBuilder(input=(18, 16, 3), name="voxels")
    down = g.relu(g.instance_norm(g.conv(g.input, 4, 3, pad=1)))
    up = g.conv_transpose(g.avg_pool(down, 2), 8, 2, stride=2)
    up = g.group_norm(up, 2)  # each group is more than one warp sums
    return g.build(g.conv(g.concat([down, up]), 3, 1)).with_loss(_loss("dice"))


def _weighed_voxels() -> Graph:
    g = GraphBuilder(input=(5, 6, 7, 2), name="weighed voxels")
    options: dict[str, Any] = {"class_weights": (0.5, 2.0, 1.0), "ignore_index": 2, "gamma": 1.5, "per_sample": True}
    x = g.prelu(g.conv(g.input, 4, 3, pad=1, pad_mode="reflect"), per_channel=True)
    x = g.crop(g.pad(x, [[1, 0], 1, 2]), [[1, 0], 1, [0, 4]])  # zeros around it, a rim of which stays
    x = g.upsample(g.avg_pool(x, (1, 2, 1)), (1, 2, 1), "linear")
    return g.build(g.conv(x, 3, 3, pad=1, pad_mode="replicate")).with_loss(_loss("dice_cross_entropy", **options))


def _vectors(loss: str) -> Graph:
    g = GraphBuilder(input=(9,), name=f"vectors with {loss}")
    x = g.norm(g.linear(g.input, 16))
    x = g.silu(g.gelu(g.elu(x))) if loss == "mse" else g.softplus(g.hardsigmoid(g.hardswish(x)))
    return g.build(g.linear(x, 3)).with_loss(_loss(loss))


def _outputs() -> Graph:
    """Several outputs with a loss each: errors, and few, some and many classes, for which a softmax is cut differently."""
    g = GraphBuilder(input=(6, 5, 3), name="outputs")
    x = g.gelu(g.norm(g.max_pool(g.conv(g.input, 7, 3, pad=1), 3, 2, pad=1)), "tanh")
    many = g.softmax(g.conv(x, 70, 1))
    losses: dict[str, Loss] = {}
    for classes in (3, 9, 70):
        name = f"{classes} classes"
        weights = tuple(1.0 + 0.5 * (n % 3) for n in range(classes))
        g.conv(many if classes == 70 else x, classes, 1, name=name)
        losses[name] = _loss("dice_cross_entropy", smoothing=0.1, class_weights=weights)
    for kind, classes in (("cross_entropy", 70), ("l1", 2), ("huber", 2)):
        g.conv(x, classes, 1, name=kind)
        losses[kind] = _loss(kind)
    return g.build(list(losses)).with_losses({name: (loss, name) for name, loss in losses.items()})
