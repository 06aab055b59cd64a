"""When programs start and wait, what travels together, and when arrays are freed or given away."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.plan.strategies import STRATEGIES, strategy_plan
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Compute, Free, Program, Start, StartMany, Update, Wait, reads, writes
from lbpar.runtime.executor import Executor
from lbpar.runtime.initial import initial_state
from lbpar.transport.virtual import VirtualWorld
from tests.program.nets import BATCH, network
from tests.util.graphs import random_graph
from tests.util.run import local_feeds, random_plan, random_state, run, samples


@pytest.fixture(params=sorted(STRATEGIES))
def plan(request: pytest.FixtureRequest) -> Plan:
    return strategy_plan(request.param, network(), Grid((2, 2)), BATCH)


def test_arrays_are_freed_after_their_last_use(plan: Plan) -> None:
    """Step by step, exactly the arrays that a later step reads, or whose move is under way, are held, in their layout's shape."""
    graph = network()
    program = lower(graph, plan, BATCH)
    last = _last_uses(program)
    kept = set(program.params) | set(program.results.values())
    world, feeds = VirtualWorld(plan.grid), samples(graph, BATCH, np.random.default_rng(0))
    executors = []
    for r in range(plan.grid.size):
        state = initial_state(graph.params(), program.params, r, 1, np.dtype(np.float64))
        executors.append(Executor(program, NumpyEngine(np.float64), world.transport(r), state))
        executors[-1].begin(local_feeds(program, r, feeds))
    most, made = 0, set(program.feeds)
    for i, step in enumerate(program.steps):
        for e in executors:
            e.execute(i)
        made |= set(writes(step))
        if i + 1 < len(program.steps) and isinstance(program.steps[i + 1], Free):
            continue
        for r, e in enumerate(executors):
            live = set(e.arrays) - kept
            assert live == {b for b in made - kept if last[b] > i}, step
            for b in live:
                if program.buffers[b].dtype != "opaque":
                    assert e.arrays[b].shape == program.buffers[b].layout.local_shape(r), b
            most = max(most, len(live))
    assert all(set(e.arrays) == kept for e in executors)
    assert most < len(program.buffers) / 2


def _last_uses(program: Program) -> dict[str, int]:
    """Index of the last step that touches each buffer; a moving one is touched until the wait."""
    last: dict[str, int] = {}
    source = {s.dst: s.src for s in program.moves}
    for i, step in enumerate(program.steps):
        if isinstance(step, Free):
            continue
        touched = {*reads(step), *writes(step)} | ({source[step.dst]} if isinstance(step, Wait) else set())
        last |= dict.fromkeys(touched, i)
    return last


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_waits_come_after_starts_and_before_readers(seed: int, overlap: bool) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    plan = random_plan(graph, 3, Grid.of(int(rng.choice([2, 4, 6]))), rng)
    program = lower(graph, plan, 3, overlap=overlap, input_grad=True)
    made: set[str] = {*program.params, *program.feeds}
    pending: set[str] = set()
    freed: set[str] = set()
    for step in program.steps:
        if isinstance(step, Free):
            assert not freed & set(step.buffers) and not pending & set(step.buffers)
            freed |= set(step.buffers)
            continue
        for b in reads(step):
            assert b in made and b not in freed, (b, step)
        if isinstance(step, Start):
            assert step.dst not in pending | made
            pending.add(step.dst)
        elif isinstance(step, Wait):
            pending.remove(step.dst)
        made |= set(writes(step))
    assert not pending
    assert made >= set(program.results.values())


def test_starts_are_early_and_waits_late() -> None:
    graph = network()
    plan = strategy_plan("data", graph, Grid((2, 2)), BATCH)
    steps = [s for s in lower(graph, plan, BATCH).steps if not isinstance(s, Free)]
    for i, step in enumerate(steps):
        if isinstance(step, Start):
            before = steps[i - 1]  # starts keep their order, so one may stand behind another
            assert step.src in writes(before) or isinstance(before, (Start, Wait)) or before.phase != step.phase
        if isinstance(step, Wait):
            after = next((s for s in steps[i + 1 :] if not isinstance(s, Wait)), None)
            assert after is None or step.dst in reads(after) or isinstance(after, Update)


def test_gradient_sums_run_beside_the_backward_pass() -> None:
    graph = network()
    plan = strategy_plan("data", graph, Grid((4,)), BATCH)
    steps = list(lower(graph, plan, BATCH).steps)
    (start,) = (i for i, s in enumerate(steps) if isinstance(s, Start) and s.src == "fc.weight:grad")
    (wait,) = (i for i, s in enumerate(steps) if isinstance(s, Wait) and s.dst == steps[start].dst)  # type: ignore[union-attr]
    beside = {s.node for s in steps[start:wait] if isinstance(s, Compute) and s.phase == "backward"}
    assert {"conv1", "conv2", "conv3"} <= beside


@pytest.mark.parametrize("seed", range(25))
def test_memory_reused_by_moves_is_read_by_no_one_else(seed: int) -> None:
    """Three training steps with donated buffers, freed arrays, overlap and merged messages leave the same bits as without."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    plan = random_plan(graph, 3, Grid.of(int(rng.choice([2, 3, 4, 6]))), rng)
    feeds, state = samples(graph, 3, rng), random_state(graph, rng)
    plain = run(graph, plan, 3, feeds, state=state, steps=3, rate=0.1, overlap=False)
    quick = run(graph, plan, 3, feeds, state=state, steps=3, rate=0.1, keep=False, bucket_bytes=int(seed % 2) * 300)
    assert not any(m.donate for m in plain.program.moves)
    for a, b in zip(plain.executors, quick.executors, strict=True):
        for name in a.state:
            np.testing.assert_array_equal(a.state[name], b.state[name], err_msg=name)
    for a, b in zip(plain.results, quick.results, strict=True):
        np.testing.assert_array_equal(a["loss"], b["loss"])


def test_partial_results_are_donated_and_kept_ones_are_not() -> None:
    graph = network()
    program = lower(graph, strategy_plan("data", graph, Grid((4,)), BATCH), BATCH)
    donated = {m.src for m in program.moves if m.donate}
    assert "fc.weight:grad" in donated
    steps = list(program.steps)
    for i, s in enumerate(steps):
        if isinstance(s, Start) and s.donate:
            assert not any(s.src in reads(t) for t in steps[i + 1 :])
            assert s.src not in {*program.params, *program.results.values()}


def allreduced(graph: Graph, limit: int, grid: Grid, strategy: str = "data") -> list[list[str]]:
    """Which gradients travel together."""
    program = lower(graph, strategy_plan(strategy, graph, grid, BATCH), BATCH, bucket_bytes=limit)
    sums = [s.starts if isinstance(s, StartMany) else (s,) for s in program.steps if isinstance(s, (Start, StartMany))]
    return [[s.src for s in starts] for starts in sums if starts[0].src.endswith(":grad")]


def linear_layers(*features: int) -> Graph:
    g = GraphBuilder((16,))
    x = g.input
    for i, n in enumerate(features):
        x = g.linear(x, n, bias=False, name=f"l{i}")
    return g.build(x).with_loss(LOSSES["mse"]())


def test_gradients_are_sent_in_buckets() -> None:
    """Of 16 * 8, 8 * 8 and 8 * 4 elements of 4 bytes, the last layer's first: 128, 256, 512 bytes."""
    graph = linear_layers(8, 8, 4)
    last, middle, first = ("l2.weight:grad",), ("l1.weight:grad",), ("l0.weight:grad",)
    for limit, wanted in (
        (0, [last, middle, first]),
        (128, [last, middle, first]),
        (129, [last + middle, first]),
        (385, [last + middle + first]),
        (1 << 20, [last + middle + first]),
    ):
        assert allreduced(graph, limit, Grid((4,))) == [list(names) for names in wanted], limit
