"""Batch norm on split tensors: which processes share statistics, that they are merged by count, and in what precision.

Guards against means of means (pytorch/pytorch #22192, PaddlePaddle/Paddle #32464), a backward pass that hangs on a channel grid
(pytorch/pytorch #182739), statistics in low precision (NVIDIA/physicsnemo #1393), and training that fails with statistics kept
local unawares (chainer/chainermn #203, #254).
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import pytest

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.plan import Plan
from tests.util.counting import assert_counted
from tests.util.run import assert_same, random_state, run, samples, serial

Stats = Literal["global", "sample", "local"]
EPS, MOMENTUM, BATCH, SHAPE = 1e-3, 0.3, 5, (7, 4, 3)


def norm_graph(stats: Stats, shape: tuple[int, ...] = SHAPE, **options: Any) -> Graph:
    g = GraphBuilder(input=shape)
    options = {"eps": EPS, "momentum": MOMENTUM, **options}
    return g.build(g.norm(g.leaky_relu(g.input), stats=stats, name="norm", **options)).with_loss(LOSSES["mse"]())


def blocks(extent: int, parts: int) -> list[slice]:
    sizes = [extent // parts + (i < extent % parts) for i in range(parts)]
    ends = list(itertools.accumulate(sizes))
    return [slice(e - s, e) for s, e in zip(sizes, ends, strict=True)]


def by_hand(
    x: np.ndarray, dy: np.ndarray, scale: np.ndarray, bias: np.ndarray, cuts: list[tuple]
) -> tuple[np.ndarray, ...]:
    """y, dx, dscale, dbias with statistics of each cut alone (a cut indexes samples and space)."""
    y, dx = np.zeros_like(x), np.zeros_like(x)
    dscale, dbias = np.zeros_like(scale), np.zeros_like(bias)
    for c in cuts:
        part, d = x[c].reshape(-1, x.shape[-1]), dy[c].reshape(-1, x.shape[-1])
        if not len(part):
            continue
        invstd = 1 / np.sqrt(part.var(0) + EPS)
        xhat = (part - part.mean(0)) * invstd
        y[c] = (xhat * scale + bias).reshape(x[c].shape)
        dscale, dbias = dscale + (d * xhat).sum(0), dbias + d.sum(0)
        dx[c] = (scale * invstd * (d - d.mean(0) - xhat * (d * xhat).mean(0))).reshape(x[c].shape)
    return y, dx, dscale, dbias


PLANS = {
    "N2": ((2,), {"N": (0,)}),
    "N3": ((3,), {"N": (0,)}),
    "N7, more than samples": ((7,), {"N": (0,)}),
    "H2": ((2,), {"H": (0,)}),
    "H5": ((5,), {"H": (0,)}),
    "H3 W2": ((3, 2), {"H": (0,), "W": (1,)}),
    "N2 H3": ((2, 3), {"N": (0,), "H": (1,)}),
    "N2 W2 C3": ((2, 2, 3), {"N": (0,), "W": (1,), "C": (2,)}),
    "C2": ((2,), {"C": (0,)}),
    "C5, more than channels": ((5,), {"C": (0,)}),
    "N2, idle 2": ((2, 2), {"N": (1,)}),
}


@pytest.mark.parametrize(("sizes", "op_grid"), PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("stats", ["global", "sample", "local"])
def test_statistics_of_groups(stats: Stats, sizes: tuple[int, ...], op_grid: dict[str, tuple[int, ...]]) -> None:
    graph, rng = norm_graph(stats), np.random.default_rng(0)
    feeds, state = samples(graph, BATCH, rng), random_state(graph, rng)
    feeds["input"] += rng.standard_normal((BATCH, *SHAPE[:-1], 1)) * 3  # groups differ much
    grid = Grid(sizes)
    plan = Plan(
        grid,
        {n.name: {("F" if n.name == "loss" and k == "C" else k): a for k, a in op_grid.items()} for n in graph.ops},
    )
    got = run(graph, plan, BATCH, feeds, state=state)
    assert_counted(got)

    def parts(loop: str, extent: int, apart: bool) -> list[slice]:
        return blocks(extent, grid.ways(op_grid.get(loop, ()))) if apart else [slice(None)]

    n, h, w = (
        parts("N", BATCH, stats != "global"),
        parts("H", SHAPE[0], stats == "local"),
        parts("W", SHAPE[1], stats == "local"),
    )
    x = np.where(feeds["input"] > 0, feeds["input"], 0.01 * feeds["input"])
    dy = got.value("norm:dy")
    want = by_hand(x, dy, state["norm.weight"], state["norm.bias"], list(itertools.product(n, h, w)))
    for value, expected in zip(("norm:y", "norm:dx0", "norm.weight:grad", "norm.bias:grad"), want, strict=True):
        np.testing.assert_allclose(got.value(value), expected, rtol=1e-11, atol=1e-12, err_msg=value)
    # Running statistics merge all processes, by count, whatever the training statistics are.
    rows = x.reshape(-1, x.shape[-1])
    mean, var = state["norm.running_mean"], state["norm.running_var"]
    np.testing.assert_allclose(
        got.state("norm.running_mean"), (1 - MOMENTUM) * mean + MOMENTUM * rows.mean(0), rtol=1e-12
    )
    np.testing.assert_allclose(
        got.state("norm.running_var"), (1 - MOMENTUM) * var + MOMENTUM * rows.var(0, ddof=1), rtol=1e-12
    )


@pytest.mark.parametrize("stats", ["sample", "local"])
def test_statistics_of_groups_move_no_more_than_they_must(stats: Stats) -> None:
    """Inside the forward and backward passes, "local" sums nothing and "sample" sums over space only."""
    graph = norm_graph(stats)
    grid = Grid((2, 2))
    plan = Plan(grid, {n.name: {"N": (0,), "H": (1,)} for n in graph.ops})
    got = run(graph, plan, BATCH, samples(graph, BATCH, np.random.default_rng(0)))
    read_by_norm = {
        b
        for s in got.program.steps
        for b in getattr(s, "reads", ())
        if getattr(s, "node", "") == "norm" and s.phase != "update"
    }
    moved = [m.move for m in got.program.moves if m.node == "norm" and m.dst in read_by_norm and "grad" not in m.dst]
    in_passes = [m for m in moved if m.dst.partial or stats == "sample"]
    assert all(m.kind == "allreduce" for m in moved)
    if stats == "sample":
        assert {m.axes for m in in_passes if m.dst.partial == (0,)} == {(1,)}
    else:
        assert not [m for m in moved if m.dst.partial]


def test_global_statistics_equal_one_rank_with_uneven_blocks() -> None:
    """5 samples on 3 ranks and 7 rows on 4: a mean of the ranks' means would differ in the first digits."""
    graph, rng = norm_graph("global"), np.random.default_rng(1)
    feeds, state = samples(graph, BATCH, rng), random_state(graph, rng)
    want = serial(graph, BATCH, feeds, state=state)
    for sizes, op_grid in (((3,), {"N": (0,)}), ((4,), {"H": (0,)}), ((3, 4), {"N": (0,), "H": (1,)})):
        assert_same(run(graph, Plan(Grid(sizes), {"norm": op_grid}), BATCH, feeds, state=state), want)


FAR_PLANS = {
    "one rank": ((), {}),
    "N2": ((2,), {"N": (0,)}),
    "H3": ((3,), {"H": (0,)}),
    "H4, W2": ((4, 2), {"H": (0,), "W": (1,)}),
    "N7, two with nothing": ((7,), {"N": (0,)}),
}


@pytest.mark.parametrize(("sizes", "op_grid"), FAR_PLANS.values(), ids=FAR_PLANS.keys())
@pytest.mark.parametrize(
    ("mean", "std", "dtype"),
    [
        (1e5, 1.0, "float64"),
        (-1e7, 1.0, "float64"),
        (1e3, 1e-6, "float64"),
        (0.0, 1e6, "float64"),
        (1e5, 1.0, "float32"),
        (1e3, 1e-2, "float32"),
    ],
)
def test_a_mean_far_from_the_running_mean_does_not_cancel(
    mean: float, std: float, dtype: str, sizes: tuple[int, ...], op_grid: dict[str, tuple[int, ...]]
) -> None:
    """y, dx and running statistics are those of the same numbers moved to zero (which is exact), at x's own resolution."""
    graph, rng = norm_graph("global"), np.random.default_rng(2)
    x = (mean + std * rng.standard_normal((BATCH, *SHAPE))).astype(dtype)
    x = np.where(x > 0, x, x / np.asarray(0.01, dtype))  # the leaky relu in front undoes it
    feeds, state = {"input": x, "target": rng.standard_normal(x.shape)}, random_state(graph, rng)
    state["norm.running_mean"][:], state["norm.running_var"][:] = 0, 1
    plan = Plan(Grid(sizes), {"norm": op_grid})
    got = run(graph, plan, BATCH, feeds, dtype=dtype, state=state)
    assert_counted(got, dtype=np.dtype(dtype))
    near = got.value(f"{graph['norm'].inputs[0]}:y").astype(np.float64) - mean
    y, dx, *_ = by_hand(near, got.value("norm:dy"), state["norm.weight"], state["norm.bias"], [(slice(None),)])
    tolerance = 20 * max(np.finfo(dtype).eps, np.spacing(np.asarray(abs(mean), dtype)) / std)
    np.testing.assert_allclose(got.value("norm:y"), y, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(got.value("norm:dx0"), dx, rtol=tolerance, atol=tolerance * np.abs(dx).max())
    rows = near.reshape(-1, SHAPE[-1])
    want = MOMENTUM * (mean + rows.mean(0))
    np.testing.assert_allclose(got.state("norm.running_mean"), want, rtol=1e-15, atol=1e-15 * std)
    variance = 1 + MOMENTUM * (rows.var(0, ddof=1) - 1)
    np.testing.assert_allclose(got.state("norm.running_var"), variance, rtol=1e-12)


def test_a_channel_split_shares_no_statistics() -> None:
    graph = norm_graph("global")
    plan = Plan(Grid((3,)), {n.name: {"C": (0,)} if n.name != "loss" else {"F": (0,)} for n in graph.ops})
    got = run(graph, plan, BATCH, samples(graph, BATCH, np.random.default_rng(0)))
    assert [m.node for m in got.program.moves] == ["loss"]


def test_inference_uses_running_statistics_and_moves_nothing() -> None:
    graph, rng = norm_graph("global"), np.random.default_rng(3)
    feeds, state = samples(graph, BATCH, rng), random_state(graph, rng)
    plan = Plan(Grid((2, 2)), {n.name: {"N": (0,), "H": (1,)} for n in graph.ops})
    got = run(graph, plan, BATCH, feeds, state=state, training=False)
    x = np.where(feeds["input"] > 0, feeds["input"], 0.01 * feeds["input"])
    xhat = (x - state["norm.running_mean"]) / np.sqrt(state["norm.running_var"] + EPS)
    np.testing.assert_allclose(got.value("norm:y"), xhat * state["norm.weight"] + state["norm.bias"], rtol=1e-12)
    assert [m.node for m in got.program.moves] == ["loss"]
    np.testing.assert_array_equal(got.state("norm.running_mean"), state["norm.running_mean"])
