"""Stages and micro-batches: any pipeline gives what one rank gives with the same micro-batches."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.order import BUCKET_BYTES
from lbpar.program.plan import SCHEDULES, Pipeline, Plan, Schedule
from lbpar.program.schedule import in_flight
from lbpar.program.steps import Free
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.executor import Executor, run_lockstep
from lbpar.runtime.initial import initial_state
from lbpar.transport.single import SingleTransport
from lbpar.transport.virtual import VirtualWorld
from tests.util.graphs import random_graph, residual_network
from tests.util.run import (
    assert_same,
    descent,
    local_feeds,
    random_pipeline,
    random_plan,
    random_state,
    run,
    samples,
)

GRIDS = [(2,), (3,), (2, 2), (2, 3), (3, 2), (4,), (2, 2, 2), (2, 4), (2, 2, 3), (6,)]
GRIDS += [(1,), (5,), (7,), (3, 3), (2, 5), (11,), (4, 3)]  # every number of ranks up to 12


def alone(micros: int) -> Plan:
    return Plan(Grid(), {}, Pipeline(micro_batches=micros))


@pytest.mark.parametrize("seed", range(51))
def test_random_pipelines_give_what_one_rank_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph, sizes = random_graph(rng), GRIDS[seed % len(GRIDS)]
    axis = int(rng.integers(len(sizes)))
    while sizes[axis] > len(graph.ops):
        graph = random_graph(rng)
    batch, micros = int(rng.integers(2, 8)), int(rng.integers(1, 6))
    feeds, state = samples(graph, batch, rng), random_state(graph, rng)
    pipeline = random_pipeline(graph, sizes[axis], axis, rng, micros)
    plan = random_plan(graph, batch, Grid(sizes), rng, pipeline=pipeline)
    options = {"state": state, "rate": 0.05, "steps": 2, "fused": bool(rng.random() < 0.7)}
    options["rims"] = bool(rng.random() < 0.5)
    assert_same(run(graph, plan, batch, feeds, **options), run(graph, alone(micros), batch, feeds, **options))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_residual_networks_over_three_stages(schedule: Schedule) -> None:
    """A network with skip connections over the borders, dropout and batch norm, spatial grids inside the stages."""
    rng, graph = np.random.default_rng(1), residual_network()
    names = [n.name for n in graph.ops]
    stages = {n: min(2, 3 * i // len(names)) for i, n in enumerate(names)}
    ops = {n.name: {"H": (0,)} for n in graph.ops if "H" in n.op.loops(graph.input_shapes(n.name, 5))}
    plan = Plan(Grid((2, 3)), ops, Pipeline((1,), stages, schedule, 4))
    feeds, state = samples(graph, 5, rng), random_state(graph, rng)
    options = {"state": state, "rate": 0.05, "steps": 2}
    assert_same(run(graph, plan, 5, feeds, **options), run(graph, alone(4), 5, feeds, **options))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_that_end_at_the_input_cross_stages(schedule: Schedule) -> None:
    """No kernel of the first stage reads what arrives."""
    rng, g = np.random.default_rng(0), GraphBuilder(input=(4, 4, 2))
    x = g.add([g.input, g.input], name="twice")
    x = g.relu(g.add([g.multiply([g.input, x], name="product"), x], name="sum"))
    graph = g.build(g.conv(x, 3, 3)).with_loss(LOSSES["mse"]())
    stages = {n.name: int(n.name != "twice") for n in graph.ops}
    feeds, state = samples(graph, 4, rng), random_state(graph, rng)
    plan = Plan(Grid((2, 2)), {n.name: {"N": (1,)} for n in graph.ops}, Pipeline((0,), stages, schedule, 2))
    assert_same(run(graph, plan, 4, feeds, state=state), run(graph, alone(2), 4, feeds, state=state))


def test_micro_batches_are_batches_whose_gradients_are_added() -> None:
    """Running statistics, losses, hits and weights after the step are those of `accumulate`; dropout too, were it counted alike."""
    rng = np.random.default_rng(2)
    g = GraphBuilder(input=(6, 6, 3))
    x = g.relu(g.norm(g.conv(g.input, 4, 3, pad=1)))
    graph = g.build(g.linear(g.flatten(x), 7)).with_loss(LOSSES["dice"]())
    feeds, state = samples(graph, 7, rng), random_state(graph, rng)
    got = run(graph, alone(3), 7, feeds, state=state, rate=0.1)
    bounds = [(0, 3), (3, 5), (5, 7)]
    held, own, loss = dict[str, np.ndarray](), {k: v.copy() for k, v in state.items()}, 0.0
    for i, (lo, hi) in enumerate(bounds):
        program = lower(graph, Plan(Grid()), hi - lo, gradients="last" if i == 2 else "accumulate")
        e = Executor(program, NumpyEngine(np.float64), SingleTransport(), own, held)
        e.micro_batch, e.on_update = MicroBatch(1, 0, (hi - lo) / 7), descent(0.1)
        e.run(local_feeds(program, 0, {k: v[lo:hi] for k, v in feeds.items()}))
        loss += float(e.value("loss")) * (hi - lo) / 7
    assert float(got.results[0]["loss"]) == pytest.approx(loss, rel=1e-13)
    for name, array in own.items():
        np.testing.assert_allclose(got.state(name), array, rtol=1e-11, atol=1e-13, err_msg=name)


def test_dropout_is_that_of_the_whole_batch() -> None:
    """Its numbers count samples of the mini-batch, so that micro-batches change nothing where samples do not meet."""
    rng = np.random.default_rng(3)
    g = GraphBuilder(input=(5, 5, 2))
    graph = g.build(g.linear(g.flatten(g.dropout(g.conv(g.input, 4, 3), 0.5)), 3)).with_loss(LOSSES["mse"]())
    feeds, state = samples(graph, 7, rng), random_state(graph, rng)
    whole = run(graph, Plan(Grid()), 7, feeds, state=state, rate=0.1)
    parts = run(graph, alone(3), 7, feeds, state=state, rate=0.1)
    for name in state:
        np.testing.assert_allclose(parts.state(name), whole.state(name), rtol=1e-11, atol=1e-13)


def chain(layers: int = 8) -> Graph:
    g = GraphBuilder(input=(4, 4, 4))
    x = g.input
    for i in range(layers):
        x = g.relu(g.conv(x, 4, 3, pad=1, name=f"c{i}"), name=f"r{i}")
    return g.build(g.linear(g.flatten(x, name="flat"), 3, name="fc")).with_loss(LOSSES["cross_entropy"]())


def cut_evenly(graph: Graph, stages: int) -> dict[str, int]:
    n = len(graph.ops)
    return {node.name: i * stages // n for i, node in enumerate(graph.ops)}


def test_weights_gradients_and_state_are_only_in_their_stage() -> None:
    graph, rng = chain(), np.random.default_rng(0)
    stages = cut_evenly(graph, 4)
    plan = Plan(Grid((4,)), {}, Pipeline((0,), stages, "1f1b", 4))
    seen: list[dict[str, int]] = []
    got = run(graph, plan, 8, samples(graph, 8, rng), keep=False)
    for e in got.executors:
        e.on_update = lambda params, grads: seen.append(
            {n: g.size for n, g in grads.items() if params[n].size or g.size}
        )
    run_lockstep(got.executors, [local_feeds(got.program, r, samples(graph, 8, rng)) for r in range(4)])
    for r, e in enumerate(got.executors):
        for name, array in e.state.items():
            home = stages[name.rpartition(".")[0]]
            assert array.size == (graph.params()[name].size if home == r else 0)
        assert seen[r] == {n: p.size for n, p in graph.params().items() if stages[n.rpartition(".")[0]] == r}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_keeps_no_more_micro_batches_than_the_schedule_allows(schedule: Schedule) -> None:
    """Counted while it runs: micro-batches of which a rank holds any activation that its own kernels made."""
    graph, rng, places, micros = chain(), np.random.default_rng(0), 4, 8
    plan = Plan(Grid((places,)), {}, Pipeline((0,), cut_evenly(graph, places), schedule, micros))
    program = lower(graph, plan, 16, bucket_bytes=BUCKET_BYTES)
    executors = run(graph, plan, 16, samples(graph, 16, rng), keep=False).executors
    for e, f in zip(executors, [local_feeds(program, r, samples(graph, 16, rng)) for r in range(places)], strict=True):
        e.begin(f)
    most = [0] * places
    for i, step in enumerate(executors[0].program.steps):
        for r, e in enumerate(executors):
            e.execute(i)
            if isinstance(step, Free):
                mine = (b for b, a in e.arrays.items() if a.size and ":y" in b and f"{b.partition(':')[0]}" in OWN[r])
                most[r] = max(most[r], len({b.partition("#")[2].partition("@")[0] for b in mine}))
    bounds = [in_flight(schedule, places, places, r) or micros for r in range(places)]
    if schedule == "zero-bubble":  # the weights' passes, which come later, read only what products multiply
        assert all(m <= b for m, b in zip(most, bounds, strict=True)) and max(most) == places
    else:
        assert most == bounds


#: Activations that the backward pass reads, of each stage of `chain`.
OWN = [{n for n, s in cut_evenly(chain(), 4).items() if s == r and n[0] == "r"} for r in range(4)]


def test_groups_are_made_by_all_ranks_before_the_first_step() -> None:
    """A stage alone would wait for the others where a library makes groups together."""
    graph = chain()
    plan = Plan(Grid((2, 2)), {n.name: {"N": (0,)} for n in graph.ops}, Pipeline((1,), cut_evenly(graph, 2), "1f1b", 2))
    program, world, made = lower(graph, plan, 8), VirtualWorld(plan.grid), list[list[tuple[int, ...]]]()
    for r, t in enumerate(world.transports):
        t.prepare = lambda axes: made.append(list(axes))  # type: ignore[method-assign]
        state = initial_state(graph.params(), program.params, r, 1, np.dtype(np.float64))
        Executor(program, NumpyEngine(np.float64), t, state)
    assert made == [[(0,), (1,)]] * 4
