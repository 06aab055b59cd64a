"""Random graphs under random grids with every engine: local windows with cropping pads, empty blocks, odd groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.plan import Plan
from tests.util.graphs import random_graph, residual_network
from tests.util.run import random_plan, random_state, run, samples, serial

#: Worst difference of a single-precision run, relative to the largest value of its kind.
TOLERANCE = {"float32": 2e-4, "float64": 1e-10}


@pytest.fixture(params=["onednn-float32", "onednn-float64", "numpy-float32"])
def engine(request: pytest.FixtureRequest) -> Any:
    name, _, dtype = request.param.partition("-")
    try:
        return get_engine(name, dtype, 1)
    except EngineError as error:
        pytest.skip(str(error))


def check(graph: Graph, plan: Plan, engine: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    feeds, state = samples(graph, 3, rng), random_state(graph, rng)
    want = serial(graph, 3, feeds, state=state, fused=False)
    got = run(graph, plan, 3, feeds, state=state, dtype=engine.dtype, engine=engine)
    tolerance = TOLERANCE[np.dtype(engine.dtype).name]
    np.testing.assert_allclose(got.results[0]["loss"], want.results[0]["loss"], rtol=tolerance)
    for node in graph.ops:
        name = f"{node.name}:y"
        if name in got.comparable() and name in want.comparable():
            y = want.value(name)
            scale = np.abs(y).max(initial=1e-2)
            np.testing.assert_allclose(got.value(name), y, rtol=0, atol=tolerance * scale, err_msg=f"{name} {plan}")
    grads = {p: want.value(f"{p}:grad") for p, x in graph.params().items() if x.kind != "statistic"}
    scale = max((np.abs(g).max() for g in grads.values()), default=0.0)
    for p, g in grads.items():
        np.testing.assert_allclose(
            got.value(f"{p}:grad"), g, rtol=0, atol=10 * tolerance * scale, err_msg=f"{p} {plan}"
        )


# Networks whose gradients have no kinks that a rounding error could cross: no max, no relu.
SMOOTH: dict[str, Any] = {
    "conv k3 s2": lambda g, x: g.conv(x, 6, 3, 2, 1),
    "conv k5 in small blocks": lambda g, x: g.conv(x, 6, 5, 1, 2),
    "valid": lambda g, x: g.conv(x, 5, 3),
    "dilated": lambda g, x: g.conv(x, 4, 3, 1, 2, dilation=2),
    "grouped": lambda g, x: g.conv(x, 8, 3, 1, 1, groups=2),
    "depthwise": lambda g, x: g.conv(x, 4, 3, 2, 1, groups=4),
    "k1 s2": lambda g, x: g.conv(x, 4, 1, 2),
    "asymmetric": lambda g, x: g.conv(x, 4, 4, 3, [[0, 2], [1, 0]]),
    "transposed": lambda g, x: g.conv_transpose(x, 4, 4, 2, 1),
    "transposed, grouped": lambda g, x: g.conv_transpose(x, 4, 3, 3, [[0, 1], [1, 0]], groups=2),
    "avg_pool": lambda g, x: g.avg_pool(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "norm": lambda g, x: g.norm(x),
    "linear": lambda g, x: g.linear(g.flatten(x), 7),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_op(engine: Any, name: str) -> None:
    g = GraphBuilder(input=(9, 8, 4))
    x = SMOOTH[name](g, g.conv(g.input, 4, 1, name="before"))
    graph = g.build(g.sigmoid(x)).with_loss(LOSSES["mse"]())
    rng = np.random.default_rng(len(name))
    for procs in (1, 2, 3, 4, 8):
        check(graph, random_plan(graph, 3, Grid.of(procs), rng, idle=0.1), engine, 0)


@pytest.mark.parametrize("engine", ["onednn-float64"], indirect=True)
@pytest.mark.parametrize("seed", range(15))
def test_random_graph(engine: Any, seed: int) -> None:
    """In double precision: in single precision rounding would decide on which side of a kink a value lies."""
    rng = np.random.default_rng([seed, 3])
    graph = random_graph(rng)
    check(graph, random_plan(graph, 3, Grid.of(int(rng.choice([2, 3, 4, 6]))), rng), engine, seed)


@pytest.mark.parametrize("sizes", [(), (2,), (2, 2), (5,)], ids=str)
def test_residual_network_in_double_precision(sizes: tuple[int, ...]) -> None:
    try:
        engine = get_engine("onednn", "float64", 1)
    except EngineError as error:
        pytest.skip(str(error))
    graph = residual_network()
    check(graph, random_plan(graph, 3, Grid(sizes), np.random.default_rng(0), idle=0.1), engine, 1)
