"""Initial values that are given replace drawn ones, block by block."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.runtime.initial import initial_state
from lbpar.runtime.worker import Worker
from lbpar.transport.single import SingleTransport
from tests.util.run import join, random_state


def _graph() -> Graph:
    g = GraphBuilder((6, 6, 3))
    x = g.norm(g.conv(g.input, 6, 3, groups=3))
    return g.build(g.linear(g.flatten(x), 5))


def test_given_blocks_make_up_the_given_arrays() -> None:
    graph, grid = _graph(), Grid((2, 3))
    ops = {"conv1": {"G": (1,), "F": (0,)}, "norm1": {"C": (1,)}, "linear1": {"F": (0,), "C": (1,)}}
    program = lower(graph, Plan(grid, ops), 2, training=False)
    given = random_state(graph, np.random.default_rng(1))
    kept = given.pop("linear1.bias")
    states = [initial_state(graph.params(), program.params, r, 7, np.dtype(np.float32), given) for r in range(6)]
    drawn = [initial_state(graph.params(), program.params, r, 7, np.dtype(np.float32)) for r in range(6)]
    for name, layout in program.params.items():
        got = join(layout, [s[name] for s in states])
        if name in given:
            kind = np.float64 if "running" in name else np.float32
            np.testing.assert_array_equal(got, given[name].astype(kind))
            assert all(s[name].dtype == kind and s[name].flags.c_contiguous for s in states)
        else:
            assert kept.shape == got.shape
            np.testing.assert_array_equal(got, join(layout, [s[name] for s in drawn]))


@pytest.mark.parametrize("some", [True, False])
def test_a_worker_starts_from_them_and_lets_them_go(some: bool) -> None:
    graph = _graph()
    given = random_state(graph, np.random.default_rng(1))
    weights = {n: given[n] for n in list(given)[:1]} if some else given
    worker = Worker(graph, Plan(Grid()), NumpyEngine(np.float64), SingleTransport(), 7, weights=weights)
    worker.executor(2, "evaluate")
    for name, array in weights.items():
        np.testing.assert_array_equal(worker.state[name], array)
        assert not np.shares_memory(worker.state[name], array)
    assert worker.weights is None
    assert set(worker.state) == set(given)
