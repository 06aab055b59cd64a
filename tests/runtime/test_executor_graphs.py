"""Random small graphs with fan-out, adds and concats under random grids per layer: every value as on one rank.

The same runs are counted: each step's messages and bytes are what the program says of it.
"""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.layout.grid import Grid
from tests.util.counting import assert_counted
from tests.util.graphs import random_graph
from tests.util.run import assert_same, random_plan, random_state, run, samples, serial

PROCS = (2, 3, 4, 5, 6, 8, 12)
CASES, PLANS = 75, 3


@pytest.mark.parametrize("seed", range(CASES))
def test_random_graph_under_random_plans(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    batch = int(rng.choice([1, 2, 3, 5]))  # often smaller than the number of sample blocks
    feeds = samples(graph, batch, rng)
    state = random_state(graph, rng)
    want = serial(graph, batch, feeds, state=state, fused=False)
    for _ in range(PLANS):
        grid = Grid.of(int(rng.choice(PROCS)))
        plan = random_plan(graph, batch, grid, rng)
        buckets = int(rng.choice([0, 200, 10**6]))
        got = run(graph, plan, batch, feeds, state=state, fused=bool(rng.random() < 0.7), bucket_bytes=buckets)
        assert_same(got, want)
        assert_counted(got)


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_in_single_precision(seed: int) -> None:
    """float32 arrays move as four bytes, statistics still as eight."""
    rng = np.random.default_rng(seed)
    graph, batch = random_graph(rng), 3
    feeds, state = samples(graph, batch, rng), random_state(graph, rng)
    want = serial(graph, batch, feeds, state=state)
    got = run(graph, random_plan(graph, batch, Grid.of(6), rng), batch, feeds, state=state, dtype=np.float32)
    assert_counted(got, dtype=np.float32)
    np.testing.assert_allclose(got.results[0]["loss"], want.results[0]["loss"], rtol=1e-3)
    for name, buffer in got.comparable().items():
        array = got.executors[0].arrays[buffer]
        assert array.dtype == np.dtype(got.program.buffers[buffer].dtype or "float32"), name
