"""Every op split in every way against the same op on one rank: the exactness table, random windows, and known symptoms.

Comments name the reports of other projects whose symptom a case guards against.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from lbpar.errors import GraphError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.plan import Plan
from tests.util.counting import assert_counted
from tests.util.run import Run, assert_same, random_plan, random_state, run, samples, serial

PROCS = (2, 3, 4, 5, 6, 8, 12)
Make = Callable[[GraphBuilder, str], str]


def around(shape: tuple[int, ...], op: Make, before: bool = True) -> Graph:
    """The op between two pointwise ops, so that its dx and its y travel, with a loss whose gradient varies."""
    g = GraphBuilder(input=shape)
    x = op(g, g.leaky_relu(g.input, name="before") if before else g.input)
    return g.build(g.sigmoid(x, name="after")).with_loss(LOSSES["mse"]())


def compare(graph: Graph, plans: list[Plan], batch: int = 2, seed: int = 0) -> list[Run]:
    rng = np.random.default_rng(seed)
    feeds, state = samples(graph, batch, rng), random_state(graph, rng)
    want = serial(graph, batch, feeds, state=state)
    out = []
    for plan in plans:
        got = run(graph, plan, batch, feeds, state=state)
        assert_same(got, want)
        assert_counted(got)
        out.append(got)
    return out


def everywhere(graph: Graph, grid: Grid, *split: tuple[str, tuple[int, ...]]) -> Plan:
    """The same split for every op that has those loops."""
    ops: dict[str, Any] = {}
    for node in graph.ops:
        loops = node.op.loops(graph.input_shapes(node.name, 2))
        ops[node.name] = {loop: axes for loop, axes in split if loop in loops}
    return Plan(grid, ops)


# The table: spatially split on 2 ranks (and more) every row must be exact.

TABLE: dict[str, tuple[tuple[int, ...], Make]] = {
    "k3 s1 p1": ((16, 16, 3), lambda g, x: g.conv(x, 4, 3, 1, 1, name="op")),
    "k7 s2 p3": ((16, 16, 3), lambda g, x: g.conv(x, 4, 7, 2, 3, name="op")),
    "k3 s2 p1": ((16, 16, 3), lambda g, x: g.conv(x, 4, 3, 2, 1, name="op")),
    "k3 s2 p1, local width 17": ((34, 34, 2), lambda g, x: g.conv(x, 2, 3, 2, 1, name="op")),
    "k1 s2 p0": ((16, 16, 3), lambda g, x: g.conv(x, 4, 1, 2, 0, name="op")),
    "k2 s2 p0": ((16, 16, 3), lambda g, x: g.conv(x, 4, 2, 2, 0, name="op")),
    "k3 valid": ((16, 16, 3), lambda g, x: g.conv(x, 4, 3, name="op")),
    "k3 dilation 2": ((16, 16, 3), lambda g, x: g.conv(x, 4, 3, 1, 2, dilation=2, name="op")),
    "k3, W=33": ((33, 33, 2), lambda g, x: g.conv(x, 2, 3, 1, 1, name="op")),
    "k3 s2, W=33": ((33, 33, 2), lambda g, x: g.conv(x, 2, 3, 2, 1, name="op")),
    "groups=4": ((16, 16, 8), lambda g, x: g.conv(x, 8, 3, 1, 1, groups=4, name="op")),
    "k4 s2 p1": ((16, 16, 3), lambda g, x: g.conv(x, 4, 4, 2, 1, name="op")),
    "conv3d k3": ((6, 7, 8, 2), lambda g, x: g.conv(x, 2, 3, 1, 1, name="op")),
    "max-pool k3 s2 p1": ((16, 16, 3), lambda g, x: g.max_pool(x, 3, 2, 1, name="op")),
    "batch norm": ((16, 16, 3), lambda g, x: g.norm(x, name="op")),
}


@pytest.mark.parametrize("procs", [2, 3, 4])
@pytest.mark.parametrize("row", TABLE)
def test_exactness_table(row: str, procs: int) -> None:
    """Each row split in every dimension of its op, all ops of the graph alike and the op alone."""
    shape, op = TABLE[row]
    graph = around(shape, op)
    grid = Grid((procs,))
    loops = graph["op"].op.loops(graph.input_shapes("op", 2))
    plans = [everywhere(graph, grid, (loop, (0,))) for loop in loops]
    plans += [Plan(grid, {"op": {loop: (0,)}}) for loop in loops]
    compare(graph, plans)


@pytest.mark.parametrize("row", TABLE)
def test_exactness_table_on_mixed_grids(row: str) -> None:
    shape, op = TABLE[row]
    graph = around(shape, op)
    rng = np.random.default_rng(len(row))
    compare(graph, [random_plan(graph, 2, Grid.of(p), rng, idle=0.1) for p in PROCS])


# Properties: random windows, groups, strides, assignments.


def random_conv(rng: np.random.Generator, rank: int, transposed: bool) -> tuple[tuple[int, ...], Make]:
    groups = int(rng.choice([1, 1, 2, 3]))
    c, f = groups * int(rng.integers(1, 4)), groups * int(rng.integers(1, 4))
    hi = 9 if rank == 2 else 6
    shape = (*(int(e) for e in rng.integers(1, hi if not transposed else 5, rank)), c)
    options = {
        "kernel": [int(v) for v in rng.integers(1, 5, rank)],
        "stride": [int(v) for v in rng.integers(1, 5, rank)],
        "pad": [[int(a), int(b)] for a, b in rng.integers(0, 4, (rank, 2))],
        "dilation": [int(v) for v in rng.integers(1, 4, rank)],
        "groups": groups,
        "bias": bool(rng.random() < 0.7),
    }
    return shape, lambda g, x: getattr(g, "conv_transpose" if transposed else "conv")(x, f, name="op", **options)


@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "conv_transpose"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("seed", range(15))
def test_random_convolution(seed: int, rank: int, transposed: bool) -> None:
    rng = np.random.default_rng([seed, rank, transposed])
    while True:
        shape, op = random_conv(rng, rank, transposed)
        try:
            graph = around(shape, op)
            break
        except GraphError:
            continue
    batch = int(rng.choice([1, 2, 5]))
    compare(
        graph, [random_plan(graph, batch, Grid.of(int(rng.choice(PROCS))), rng, 0.1) for _ in range(3)], batch, seed
    )


def random_pool(rng: np.random.Generator, rank: int, kind: str) -> tuple[tuple[int, ...], Make]:
    shape = (*(int(e) for e in rng.integers(2, 9 if rank == 2 else 6, rank)), int(rng.integers(1, 4)))
    kernel = [int(v) for v in rng.integers(1, 4, rank)]
    options: dict[str, Any] = {
        "kernel": kernel,
        "stride": [int(v) for v in rng.integers(1, 4, rank)],
        "pad": [[int(v) for v in rng.integers(0, k // 2 + 1, 2)] for k in kernel],
        "ceil_mode": bool(rng.random() < 0.5),
    }
    if kind == "max_pool":
        options["dilation"] = int(rng.integers(1, 3))
    else:
        options["count_include_pad"] = bool(rng.random() < 0.5)
    return shape, lambda g, x: getattr(g, kind)(x, name="op", **options)


@pytest.mark.parametrize("kind", ["max_pool", "avg_pool"])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_random_pool(seed: int, rank: int, kind: str) -> None:
    rng = np.random.default_rng([seed, rank])
    while True:
        shape, op = random_pool(rng, rank, kind)
        try:
            graph = around(shape, op)
            break
        except GraphError:
            continue
    batch = int(rng.choice([1, 2, 5]))
    compare(
        graph, [random_plan(graph, batch, Grid.of(int(rng.choice(PROCS))), rng, 0.1) for _ in range(3)], batch, seed
    )


OTHERS: dict[str, tuple[tuple[int, ...], Make]] = {
    "linear": ((7,), lambda g, x: g.linear(x, 5)),
    "linear without bias": ((3,), lambda g, x: g.linear(x, 2, bias=False)),
    "global_avg_pool": ((5, 3, 4), lambda g, x: g.global_avg_pool(x)),
    "global_avg_pool 3-D": ((2, 5, 3, 4), lambda g, x: g.global_avg_pool(x)),
    "flatten": ((3, 2, 5), lambda g, x: g.flatten(x)),
    "flatten to linear": ((3, 2, 5), lambda g, x: g.linear(g.flatten(x), 4)),
    "upsample": ((3, 4, 2), lambda g, x: g.upsample(x, (2, 3))),
    "upsample 3-D": ((2, 3, 2, 2), lambda g, x: g.upsample(x, 2)),
    "upsample linear": ((5, 4, 2), lambda g, x: g.upsample(x, (2, 3), "linear")),
    "upsample linear 3-D": ((3, 4, 2, 2), lambda g, x: g.upsample(x, (2, 1, 4), "linear")),
    "upsample with corners": ((5, 7, 2), lambda g, x: g.upsample(x, (2, 3), "linear", align_corners=True)),
    "upsample with corners 3-D": ((1, 4, 9, 2), lambda g, x: g.upsample(x, (2, 4, 3), "linear", align_corners=True)),
    "reflect": ((5, 4, 2), lambda g, x: g.pad(x, [[3, 1], [0, 2]], "reflect")),
    "replicate": ((3, 2, 4, 2), lambda g, x: g.pad(x, [[4, 1], [0, 2], 0], "replicate")),
    "conv that reflects": ((5, 7, 2), lambda g, x: g.conv(x, 3, 3, stride=2, pad=[1, [2, 1]], pad_mode="reflect")),
    "conv that repeats 3-D": ((3, 4, 5, 2), lambda g, x: g.conv(x, 3, 3, pad=1, pad_mode="replicate")),
    "prelu": ((4, 3, 5), lambda g, x: g.prelu(x, per_channel=True)),
    "prelu of one slope": ((4, 3, 2, 2), lambda g, x: g.prelu(x)),
    "norm": ((4, 5, 3), lambda g, x: g.norm(x)),
    "norm 3-D without affine": ((3, 2, 5, 3), lambda g, x: g.norm(x, affine=False)),
    "norm of features": ((6,), lambda g, x: g.norm(x)),
    "instance_norm": ((4, 5, 3), lambda g, x: g.instance_norm(x)),
    "instance_norm 3-D without affine": ((3, 2, 5, 3), lambda g, x: g.instance_norm(x, affine=False)),
    "group_norm": ((4, 5, 6), lambda g, x: g.group_norm(x, 3)),
    "group_norm of one group": ((3, 2, 5, 3), lambda g, x: g.group_norm(x, 1)),
    "group_norm of features": ((6,), lambda g, x: g.group_norm(x, 2, affine=False)),
    "layer_norm": ((3, 4, 5), lambda g, x: g.layer_norm(x)),
    "layer_norm of features": ((6,), lambda g, x: g.layer_norm(x, affine=False)),
    "pad": ((4, 5, 2), lambda g, x: g.pad(x, [[3, 1], [0, 2]])),
    "pad wider than the input": ((3, 2, 2), lambda g, x: g.pad(x, [[7, 0], [0, 5]])),
    "crop": ((3, 7, 6, 2), lambda g, x: g.crop(x, [[1, 0], [2, 3], 1])),
    "fit": ((5, 7, 2), lambda g, x: g.fit([g.conv(x, 3, 2, 2), x])),
    "relu": ((4, 3, 2), lambda g, x: g.relu(x)),
    "leaky_relu": ((4, 3, 2), lambda g, x: g.leaky_relu(x)),
    "sigmoid": ((4, 3, 2), lambda g, x: g.sigmoid(x)),
    "elu and silu": ((4, 3, 2), lambda g, x: g.silu(g.elu(x, 0.5))),
    "gelu and softplus": ((4, 3, 2), lambda g, x: g.softplus(g.gelu(x, "tanh"), 2.0)),
    "hard forms": ((4, 3, 2), lambda g, x: g.hardswish(g.hardsigmoid(x))),
    "tanh": ((4, 3, 2), lambda g, x: g.tanh(x, 1.2)),
    "local_response_norm": ((3, 2, 7), lambda g, x: g.local_response_norm(x, 3, alpha=2.0)),
    "local_response_norm of an even size": ((2, 3, 2, 5), lambda g, x: g.local_response_norm(x, 4, 0.5, 0.6, 2.0)),
    "softmax": ((3, 2, 5), lambda g, x: g.softmax(x)),
    "softmax of features": ((7,), lambda g, x: g.softmax(x)),
    "channel_shuffle": ((3, 2, 12), lambda g, x: g.channel_shuffle(x, 3)),
    "dropout": ((4, 3, 5), lambda g, x: g.dropout(x, 0.4)),
    "add": ((4, 3, 2), lambda g, x: g.add([x, g.sigmoid(x), x])),
    "multiply": ((4, 3, 2), lambda g, x: g.multiply([x, g.sigmoid(x), x])),
    "concat": ((4, 3, 2), lambda g, x: g.concat([x, g.conv(x, 3, 1), x, g.conv(x, 1, 1)])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ops(name: str) -> None:
    shape, op = OTHERS[name]
    graph = around(shape, op)
    rng = np.random.default_rng(len(name))
    for batch in (1, 3):
        compare(graph, [random_plan(graph, batch, Grid.of(p), rng, 0.1) for p in PROCS], batch)


WEIGHTS = (0.5, 2.0, 0.0, 1.0, 3.0)
LOSS_KINDS: dict[str, dict[str, Any]] = {
    "cross_entropy": {},
    "cross_entropy smoothed": {"smoothing": 0.2},
    "cross_entropy weighted": {"smoothing": 0.2, "class_weights": WEIGHTS, "ignore_index": 255},
    "focal": {"gamma": 1.5, "class_weights": WEIGHTS, "ignore_index": -1},
    "dice": {},
    "dice of foregrounds": {"background": False, "per_sample": True, "ignore_index": 255, "class_weights": WEIGHTS},
    "dice_cross_entropy": {"dice": 0.5, "cross_entropy": 2.0},
    "dice_cross_entropy weighted": {"class_weights": WEIGHTS, "ignore_index": 0, "per_sample": True},
    "mse": {},
    "l1": {},
    "huber": {},
    "bce": {},
}


@pytest.mark.parametrize("shape", [(5,), (3, 4, 5), (2, 3, 2, 5)], ids=["samples", "pixels", "voxels"])
@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_losses_with_split_classes(kind: str, shape: tuple[int, ...]) -> None:
    g = GraphBuilder(input=shape)
    graph = g.build(g.leaky_relu(g.input)).with_loss(LOSSES[kind.split()[0]](**LOSS_KINDS[kind]))
    rng = np.random.default_rng(len(kind))
    split = [everywhere(graph, Grid((p,)), ("F", (0,)), ("C", (0,))) for p in (2, 3, 8)]  # 8: more ranks than classes
    compare(graph, [*split, *(random_plan(graph, 3, Grid.of(p), rng, 0.1) for p in PROCS)], 3)


@pytest.mark.parametrize("shape", [(5,), (3, 4, 5), (2, 3, 2, 5)], ids=["samples", "pixels", "voxels"])
@pytest.mark.parametrize("ignore", [None, 255, 1])
def test_what_metrics_follow_from_is_counted_exactly(ignore: int | None, shape: tuple[int, ...]) -> None:
    """Also where classes are equal: the first of them counts, wherever it lies. Counts are numbers of positions, without rounding."""
    g = GraphBuilder(input=shape)
    loss = LOSSES["dice"](metrics=("dice", "confusion"), ignore_index=ignore)
    graph = g.build(g.leaky_relu(g.input)).with_loss(loss)
    rng = np.random.default_rng(3)
    feeds = samples(graph, 4, rng)
    feeds["input"] = rng.integers(-1, 2, feeds["input"].shape).astype(float)
    found, target = feeds["input"].argmax(-1), feeds["target"]
    known = np.full(target.shape, True) if ignore is None else target != ignore
    want = np.array([[(known & (target == i) & (found == j)).sum() for j in range(5)] for i in range(5)])
    split = [everywhere(graph, Grid((p,)), ("F", (0,)), ("C", (0,))) for p in (2, 3, 8)]
    for plan in (Plan(Grid(), {}), *split, *(random_plan(graph, 4, Grid.of(p), rng, 0.1) for p in PROCS)):
        got = run(graph, plan, 4, feeds, training=False)
        assert_counted(got)
        for r in got.results:
            np.testing.assert_array_equal(r["confusion"], want)
            np.testing.assert_array_equal(r["counts"], [want.diagonal(), want.sum(0), want.sum(1)])
            assert r["hits"][0] == want.trace() and (ignore is None or r["hits"][-1] == known.sum())


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_errors_are_summed_over_all_ranks(kind: str) -> None:
    g = GraphBuilder(input=(3, 4, 5))
    graph = g.build(g.leaky_relu(g.input)).with_loss(LOSSES[kind](metrics=("mae",)))
    rng = np.random.default_rng(3)
    feeds = samples(graph, 3, rng)
    x = np.where(feeds["input"] > 0, 1, 0.01) * feeds["input"]
    d = x - feeds["target"]
    for plan in (Plan(Grid(), {}), *(random_plan(graph, 3, Grid.of(p), rng, 0.1) for p in PROCS)):
        got = run(graph, plan, 3, feeds, training=False)
        assert_counted(got)
        for r in got.results:
            np.testing.assert_allclose(r["errors"], [np.abs(d).sum(), (d * d).sum()], rtol=1e-13)
    assert "errors" not in serial(graph, 3, feeds).results[0]  # training measures none


# Symptoms that users of other projects met.


def conv_net(shape: tuple[int, ...] = (8, 8, 4), **options: Any) -> Graph:
    return around(
        shape, lambda g, x: g.conv(x, options.pop("filters", 4), options.pop("kernel", 3), name="op", **options)
    )


def test_dx_lies_where_the_producer_wants_it() -> None:
    """pytorch/pytorch #191926: dx of a split convolution was placed as its y."""
    graph = conv_net(pad=1, filters=6)
    (got,) = compare(
        graph, [Plan(Grid((2, 2)), {"before": {"C": (0,), "N": (1,)}, "op": {"F": (0,), "H": (1,)}, "after": {}})]
    )
    layout = got.program.buffers[got.program.values["before:dy"]].layout
    assert (layout.placement(0), layout.placement(1)) == ("S(3)", "S(0)")


def test_a_pure_sample_grid_is_free_of_spatial_checks() -> None:
    """pytorch/pytorch #176446: kernels larger than a block, odd sizes and strides are no matter to a sample split."""
    graph = conv_net((5, 7, 2), kernel=5, stride=3, pad=2)
    (got,) = compare(graph, [everywhere(graph, Grid((2,)), ("N", (0,)))])
    assert {m.move.kind for m in got.program.moves} == {"allreduce"}


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("procs", [2, 3, 4, 8])
def test_grouped_and_depthwise_convolution_on_channel_grids(groups: int, procs: int) -> None:
    """pytorch/pytorch #186129."""
    graph = conv_net(pad=1, groups=groups, filters=8)
    grid = Grid((procs,))
    compare(
        graph, [Plan(grid, {"before": {"C": (0,)}, "op": {x: (0,)}, "after": {"C": (0,)}}) for x in ("G", "C", "F")]
    )


def test_grouped_convolution_split_by_groups_moves_no_activations() -> None:
    """openxla/xla #47945 and a gathered batch for grouped convolutions: bytes are asserted as well as values."""
    graph = conv_net(pad=1, groups=4, filters=8)
    grid = Grid((4,))
    (got,) = compare(
        graph, [Plan(grid, {"before": {"C": (0,)}, "op": {"G": (0,)}, "after": {"C": (0,)}, "loss": {"F": (0,)}})]
    )
    assert {m.move.kind for m in got.program.moves} == {"allreduce"}  # the loss: a scalar
    assert {m.src for m in got.program.moves} == {"loss:y"}


@pytest.mark.parametrize("stride", [2, 3, 4])
@pytest.mark.parametrize("pad", [0, 1, (0, 2), (3, 1)])
@pytest.mark.parametrize("kernel", [2, 4])
def test_even_kernels_asymmetric_pads_and_large_strides(kernel: int, pad: Any, stride: int) -> None:
    """distdl/distdl #173, #178 (one-sided halos) and jax-ml/jax #16894 (stride 2 to 4 with a filter grid)."""
    graph = conv_net((11, 13, 3), kernel=kernel, stride=stride, pad=[pad, pad])
    compare(
        graph, [everywhere(graph, Grid((2, 2)), ("H", (0,)), ("F", (1,))), everywhere(graph, Grid((3,)), ("W", (0,)))]
    )


def test_backward_is_as_good_as_forward() -> None:
    """jax-ml/jax #31798 (backward failed where forward ran) and mpi4dl (no backward through halos)."""
    graph = conv_net((9, 9, 3), stride=2, pad=1)
    (got,) = compare(graph, [everywhere(graph, Grid((3,)), ("H", (0,)))])
    backward = [m.move.kind for m in got.program.moves if m.phase == "backward"]
    assert "halo" in backward


@pytest.mark.parametrize("sizes", [(1,), (1, 2), (2, 1, 1)])
def test_groups_of_one(sizes: tuple[int, ...]) -> None:
    """NVIDIA/physicsnemo #1400: an axis with a single process, on any loop."""
    graph = conv_net(pad=1)
    grid = Grid(sizes)
    loops = ("N", "H", "W", "F", "C")
    compare(
        graph,
        [
            Plan(
                grid,
                {n.name: {x: grid.axes} if x in n.op.loops(graph.input_shapes(n.name, 2)) else {} for n in graph.ops},
            )
            for x in loops
        ],
    )


@pytest.mark.parametrize("loop", ["N", "H", "W", "F", "C"])
def test_more_ranks_than_rows(loop: str) -> None:
    """tinygrad/tinygrad #8656, #3152: uneven shards and empty ones, on every loop."""
    graph = conv_net((3, 4, 3), pad=1, filters=2)
    grid = Grid((7,))
    compare(graph, [Plan(grid, {"op": {loop: (0,)}}), everywhere(graph, grid, (loop, (0,)))])


def test_halos_wider_than_a_neighbours_block() -> None:
    graph = conv_net((7, 6, 2), kernel=7, pad=3)
    compare(
        graph, [everywhere(graph, Grid((5,)), ("H", (0,))), everywhere(graph, Grid((2, 3)), ("H", (0,)), ("W", (1,)))]
    )


def test_batches_smaller_than_the_number_of_sample_blocks() -> None:
    """LBANN/lbann #97."""
    graph = around((6, 6, 2), lambda g, x: g.norm(g.conv(x, 3, 3, pad=1), name="op"))
    for batch in (1, 2, 3):
        compare(
            graph, [everywhere(graph, Grid((2, 2)), ("N", (0, 1))), everywhere(graph, Grid((5,)), ("N", (0,)))], batch
        )


def test_mixed_grids_with_fan_out() -> None:
    """LBANN/lbann #2158: a layer read by several others on different grids met an empty matrix."""

    def op(g: GraphBuilder, x: str) -> str:
        a = g.conv(x, 4, 3, pad=1, name="stem")
        b, c = g.conv(a, 4, 3, pad=1, name="left"), g.conv(a, 4, 1, name="right")
        return g.concat([g.add([a, b], name="sum"), c, a], name="op")

    graph = around((5, 6, 3), op)
    rows, columns = {"H": (0, 1)}, {"F": (1,), "C": (0,)}
    ops = {
        "stem": {"N": (1,), "H": (0,)},
        "left": rows,
        "right": columns,
        "sum": {"C": (0,), "W": (1,)},
        "op": {"C": (1, 0)},
    }
    compare(graph, [Plan(Grid(s), ops) for s in ((2, 2), (3, 2), (5, 2))])


@pytest.mark.parametrize(("a", "b"), list(product("NHWFC", "NHWFC")))
def test_every_pair_of_splits(a: str, b: str) -> None:
    """Two convolutions in a row, each split in one way of five, on two axes whose order differs."""

    def op(g: GraphBuilder, x: str) -> str:
        return g.conv(g.conv(x, 5, 3, pad=1, name="one"), 4, 3, stride=2, pad=1, name="two")

    graph = around((6, 7, 3), op)
    compare(
        graph,
        [
            Plan(Grid((2, 3)), {"one": {a: (1, 0)}, "two": {b: (0, 1)}}),
            Plan(Grid((2, 3)), {"one": {a: (0,)}, "two": {b: (1,)}}),
        ],
    )
