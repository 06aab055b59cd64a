"""Programs under MPI against one rank: the same cases as on virtual ranks, and the same training run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.exchange import volume
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import SCHEDULES, Pipeline, Plan, Schedule
from lbpar.program.steps import Program
from lbpar.runtime.executor import Executor
from lbpar.transport.checked import CheckedTransport
from lbpar.transport.mpi import MpiTransport
from tests.util.graphs import random_graph, residual_network, shared_network
from tests.util.mpi import collective_assert
from tests.util.run import (
    Run,
    cut,
    difference,
    local_feeds,
    nbytes,
    random_pipeline,
    random_plan,
    random_state,
    run,
    samples,
)
from tests.util.steps import BATCH, STEPS, Rank, batches, five_plans, train_alone

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def transport() -> Iterator[MpiTransport]:
    t = MpiTransport()
    yield t
    t.close()


def blocks(program: Program, rank: int, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k: cut(x.box(rank), state[k]) for k, x in program.params.items()}


def execute(program: Program, transport: Any, feeds: dict[str, np.ndarray], state: dict[str, np.ndarray]) -> Executor:
    e = Executor(program, NumpyEngine(np.float64), transport, blocks(program, transport.rank, state))
    e.micro_batch.seed = 1
    e.run(local_feeds(program, transport.rank, feeds))
    return e


def assert_blocks(e: Executor, want: Run, transport: Any) -> None:
    """This rank's block of everything is its part of the one-rank run."""
    program, rank = e.program, transport.rank
    reference = want.comparable()
    of = {n: b for n, b in reference.items() if n.partition("#")[0].endswith(("grad", ":dy"))}
    gradients = max(np.abs(want.array(b)).max(initial=0) for b in of.values())
    with collective_assert(transport):
        for name, buffer in program.values.items():
            layout = program.buffers[buffer].layout
            plain = not layout.partial and not layout.has_ghosts and layout.holds(rank)
            if name in reference and plain and name.partition("#")[0] != "loss:rank":
                part = cut(layout.box(rank), want.array(reference[name]))
                scale = max(np.abs(want.array(reference[name])).max(initial=0), 1e-2 * gradients)
                assert difference(e.arrays[buffer], part, scale) <= 1e-10, (name, program.plan)
        for name, block in e.state.items():
            assert difference(block, cut(program.params[name].box(rank), want.state(name)), 1e-3) <= 1e-10, name


def check(graph: Graph, plan: Plan, batch: int, transport: MpiTransport, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    feeds, state = samples(graph, batch, rng), random_state(graph, rng)
    program = lower(graph, plan, batch, keep=True, input_grad=True)
    transport.counter.reset()
    e = execute(program, CheckedTransport(transport), feeds, state)
    sent, size = transport.counter.by_tag(), 0
    for start in program.moves:
        said = volume(start.move, transport.rank)
        size += nbytes(program.buffers[start.src], said.elements)
        with collective_assert(transport):
            got = sent.get(start.dst)
            assert (said.messages == 0) if got is None else got.messages == said.messages, start
    with collective_assert(transport):
        assert transport.counter.total().bytes == size
    one = Plan(Grid(), pipeline=Pipeline(micro_batches=plan.micro_batches))
    assert_blocks(e, run(graph, one, batch, feeds, state=state), transport)


@pytest.mark.parametrize("seed", range(15))
def test_random_graph_under_a_random_plan(transport: MpiTransport, seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    batch = int(rng.choice([1, 2, 3, 5]))
    check(graph, random_plan(graph, batch, transport.grid, rng), batch, transport, seed)


@pytest.mark.parametrize("seed", range(12))
def test_random_graph_under_a_random_pipeline(transport: MpiTransport, seed: int) -> None:
    rng = np.random.default_rng(seed)
    axis = int(rng.integers(len(transport.grid.sizes)))
    graph = random_graph(rng)
    while len(graph.ops) < transport.grid.sizes[axis]:
        graph = random_graph(rng)
    pipeline = random_pipeline(graph, transport.grid.sizes[axis], axis, rng, int(rng.integers(1, 5)))
    batch = int(rng.integers(2, 8))
    check(graph, random_plan(graph, batch, transport.grid, rng, pipeline=pipeline), batch, transport, seed)


@pytest.mark.parametrize("seed", range(6))
def test_layers_that_share_parameters(transport: MpiTransport, seed: int) -> None:
    """On grids, and in stages."""
    rng, pipeline = np.random.default_rng(seed), None
    graph = shared_network(norm=seed % 2 == 0)
    if seed % 2:
        axis = int(rng.integers(len(transport.grid.sizes)))
        pipeline = random_pipeline(graph, transport.grid.sizes[axis], axis, rng, int(rng.integers(1, 5)))
    batch = int(rng.integers(2, 8))
    check(graph, random_plan(graph, batch, transport.grid, rng, pipeline=pipeline), batch, transport, seed)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelines_without_looking_whether_all_come(transport: MpiTransport, schedule: Schedule) -> None:
    """Ranks run apart, as far as messages allow; messages are large enough that a send needs its receiver."""
    graph, rng = residual_network(), np.random.default_rng(0)
    places, n = transport.grid.sizes[0], len(graph.ops)
    stages = {node.name: i * places // n for i, node in enumerate(graph.ops)}
    plan = Plan(transport.grid, {}, Pipeline((0,), stages, schedule, 4))
    feeds, state = samples(graph, 64, rng), random_state(graph, rng)
    want = run(graph, Plan(Grid(), pipeline=Pipeline(micro_batches=4)), 64, feeds, state=state)
    program = lower(graph, plan, 64, keep=True, input_grad=True)
    for progress in ("test", "block", "thread"):
        e = Executor(program, NumpyEngine(np.float64), transport, blocks(program, transport.rank, state))
        e.progress, e.micro_batch.seed = progress, 1
        e.run(local_feeds(program, transport.rank, feeds))
        assert_blocks(e, want, transport)


OPS: dict[str, tuple[tuple[int, ...], Any]] = {
    "conv k3 s2 p1, W=33": ((33, 33, 2), lambda g, x: g.conv(x, 4, 3, 2, 1, name="op")),
    "conv k7 wider than a block": ((5, 5, 2), lambda g, x: g.conv(x, 4, 7, 1, 3, name="op")),
    "grouped conv": ((6, 6, 4), lambda g, x: g.conv(x, 8, 3, 1, 1, groups=4, name="op")),
    "conv3d": ((5, 4, 6, 2), lambda g, x: g.conv(x, 3, 3, 1, 1, name="op")),
    "conv_transpose": ((4, 5, 3), lambda g, x: g.conv_transpose(x, 4, 4, 2, 1, name="op")),
    "max_pool k3 s2 p1": ((9, 8, 3), lambda g, x: g.max_pool(x, 3, 2, 1, name="op")),
    "avg_pool": ((9, 8, 3), lambda g, x: g.avg_pool(x, 3, 2, 1, name="op")),
    "norm": ((5, 3, 3), lambda g, x: g.norm(x, name="op")),
    "linear": ((7,), lambda g, x: g.linear(x, 5, name="op")),
    "concat": ((4, 3, 3), lambda g, x: g.concat([x, g.sigmoid(x)], name="op")),
}


@pytest.mark.parametrize("name", OPS)
def test_every_split_of_an_op(transport: MpiTransport, name: str) -> None:
    shape, op = OPS[name]
    g = GraphBuilder(input=shape)
    graph = g.build(g.sigmoid(op(g, g.leaky_relu(g.input, name="before")), name="after")).with_loss(LOSSES["mse"]())
    grid = transport.grid
    for loop in graph["op"].op.loops(graph.input_shapes("op", 3)):
        check(graph, Plan(grid, {"op": {loop: grid.axes}}), 3, transport)


@pytest.fixture(scope="module")
def one_rank() -> tuple[np.ndarray, Rank]:
    graph = residual_network()
    return train_alone(graph, batches(graph, STEPS))


@pytest.mark.parametrize("which", ["data", "spatial", "stationary-w", "mixed1", "mixed2"])
def test_training_equals_one_rank(transport: MpiTransport, one_rank: tuple[np.ndarray, Rank], which: str) -> None:
    """Thirty steps with momentum, weight decay, batch norm and dropout: the loss curve to 1e-8, and the final state."""
    graph = residual_network()
    feeds = batches(graph, STEPS)
    plan = five_plans(graph, transport.grid)[which]
    program = lower(graph, plan, BATCH, bucket_bytes=2000)
    rank = Rank(program, graph, CheckedTransport(transport))
    losses = rank.train(feeds)
    want, alone = one_rank
    with collective_assert(transport):
        np.testing.assert_allclose(losses, want, rtol=1e-8)
        for name, block in rank.state.items():
            part = cut(program.params[name].box(transport.rank), alone.state[name])
            np.testing.assert_allclose(block, part, rtol=1e-7, atol=1e-8, err_msg=name)
