"""Layers that share parameters: gradients of all are added where the parameters are, on any grids and in any stages."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.registry import get_engine
from lbpar.errors import EngineError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import SCHEDULES, Pipeline, Plan, Schedule
from lbpar.runtime.executor import Executor, run_lockstep
from lbpar.runtime.initial import initial_state
from lbpar.transport.virtual import VirtualWorld
from tests.util.counting import assert_counted
from tests.util.graphs import shared_network
from tests.util.run import (
    assert_same,
    cut,
    descent,
    local_feeds,
    random_pipeline,
    random_plan,
    random_state,
    run,
    samples,
    serial,
)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_one_rank_computes_what_pytorch_does(fused: bool, groups: int) -> None:
    """PyTorch has one tensor for all; its running statistics are updated by each norm in turn."""
    pytest.importorskip("torch")
    from tests.util.torch_graph import step

    graph, rng = shared_network(groups=groups), np.random.default_rng(groups)
    feeds, state = samples(graph, 3, rng), random_state(graph, rng)
    got, want = serial(graph, 3, feeds, state=state, fused=fused), step(graph, feeds, state)
    assert set(want.state) == set(graph.params()) == set(got.program.params)
    assert not any("again" in n or "last" in n for n in graph.params())
    for name, grad in want.grad.items():
        np.testing.assert_allclose(got.value(f"{name}:grad"), grad, rtol=0, atol=1e-10 * np.abs(grad).max())
    np.testing.assert_allclose(got.value("input:dy"), want.dy["input"], atol=1e-10 * np.abs(want.dy["input"]).max())
    np.testing.assert_allclose(got.results[0]["loss"], want.y["loss"], rtol=1e-12)
    for name in ("norm.running_mean", "norm.running_var"):
        np.testing.assert_allclose(got.state(name), want.state[name], rtol=1e-12)


@pytest.mark.parametrize("seed", range(24))
def test_any_grids_give_what_one_rank_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph, batch = shared_network(groups=int(rng.choice([1, 1, 2]))), int(rng.choice([1, 2, 3, 5]))
    feeds, state = samples(graph, batch, rng), random_state(graph, rng)
    grid = Grid.of(int(rng.choice([2, 3, 4, 6])))
    plan = random_plan(graph, batch, grid, rng)
    if seed % 3 == 0:
        again = tuple(n.name for n in graph.ops if n is not graph.loss and rng.random() < 0.5)
        plan = Plan(plan.grid, plan.ops, recompute=again)
    options = {"state": state, "rate": 0.05, "steps": 2}
    more = {"fused": bool(rng.random() < 0.7), "bucket_bytes": int(rng.choice([0, 200, 10**6])), "rims": seed % 2 == 0}
    got = run(graph, plan, batch, feeds, **options, **more)
    assert_same(got, serial(graph, batch, feeds, **options))
    if not plan.recompute:
        assert_counted(run(graph, plan, batch, feeds, state=state))


@pytest.mark.parametrize("seed", range(24))
def test_stages_give_what_one_rank_gives(seed: int) -> None:
    """Values go to the stages that want them once a step; gradients come back at its end."""
    rng = np.random.default_rng(100 + seed)
    graph, sizes = shared_network(norm=False), [(2,), (3,), (2, 2), (2, 3), (4,), (6,)][seed % 6]
    batch, micros, axis = int(rng.integers(2, 8)), int(rng.integers(1, 6)), int(rng.integers(len(sizes)))
    feeds, state = samples(graph, batch, rng), random_state(graph, rng)
    pipeline = random_pipeline(graph, sizes[axis], axis, rng, micros)
    plan = random_plan(graph, batch, Grid(sizes), rng, pipeline=pipeline)
    if seed % 3 == 0:
        again = tuple(n.name for n in graph.ops if n is not graph.loss and rng.random() < 0.5)
        plan = Plan(plan.grid, plan.ops, pipeline, again)
    options = {"state": state, "rate": 0.05, "steps": 2, "fused": bool(rng.random() < 0.7)}
    one = Plan(Grid(), {}, Pipeline(micro_batches=micros))
    got = run(graph, plan, batch, feeds, **options, bucket_bytes=int(rng.choice([0, 10**6])))
    assert_same(got, run(graph, one, batch, feeds, **options))
    if seed % 4 == 1:
        run(graph, plan, batch, feeds, **options, keep=False)  # nothing is freed too early


#: Worst difference, relative to the largest value of its kind.
TOLERANCE = {"float32": 2e-4, "float64": 1e-10}


@pytest.mark.parametrize("sizes", [(), (2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("staged", [False, True], ids=["grids", "stages"])
@pytest.mark.parametrize("kind", ["onednn-float32", "onednn-float64", "numpy-float32"])
def test_engines_compute_what_pytorch_does(kind: str, staged: bool, sizes: tuple[int, ...]) -> None:
    """Every output, the gradient of the input, every gradient of parameters, and the update, on grids and in stages."""
    pytest.importorskip("torch")
    from tests.util.torch_graph import step

    name, _, dtype = kind.partition("-")
    try:
        engine = get_engine(name, dtype, 1)
    except EngineError as error:
        pytest.skip(str(error))
    rng, batch, rate = np.random.default_rng(len(sizes)), 4, 0.1
    graph = shared_network(norm=not staged)
    feeds, state = samples(graph, batch, rng), random_state(graph, rng)
    pipeline = random_pipeline(graph, sizes[-1] if sizes else 1, len(sizes) - 1, rng, 2) if staged else None
    if pipeline is not None and not sizes:
        pipeline = Pipeline(micro_batches=2)
    plan = random_plan(graph, batch, Grid(sizes), rng, idle=0.1, pipeline=pipeline)
    got = run(graph, plan, batch, feeds, state=state, rate=rate, dtype=engine.dtype, engine=engine)
    want, tolerance = step(graph, feeds, state), TOLERANCE[dtype]

    def close(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * np.abs(wanted).max(), err_msg=what)

    np.testing.assert_allclose(got.results[0]["loss"], want.y["loss"], rtol=tolerance)
    if not staged:
        close(got.value("input:dy"), want.dy["input"], "dx")
        for node in graph.ops:
            if f"{node.name}:y" in got.comparable():
                close(got.value(f"{node.name}:y"), want.y[node.name], node.name)
    for name, grad in want.grad.items():
        close(got.value(f"{name}:grad"), grad, name)
        close(got.state(name), state[name] - rate * grad, name)


def tied(filters: int = 4) -> Graph:
    """Two convolutions with the same weights, with others between."""
    g = GraphBuilder(input=(6, 6, filters))
    x = g.relu(g.conv(g.input, filters, 3, pad=1, bias=False, name="a"))
    x = g.relu(g.conv(x, filters, 3, pad=1, bias=False, name="b"))
    return g.build(g.conv(x, filters, 3, pad=1, bias=False, name="c", share="a")).with_loss(LOSSES["mse"]())


@pytest.mark.parametrize("schedule", SCHEDULES[:2])
def test_weights_cross_stages_once_a_step(schedule: Schedule) -> None:
    graph = tied()
    stages = {n.name: int(n.name in ("c", "loss")) for n in graph.ops}
    program = lower(graph, Plan(Grid((2,)), {}, Pipeline((0,), stages, schedule, 4)), 8)
    crossing = [s for s in program.moves if s.move.src.at != s.move.dst.at and "a.weight" in s.src]
    assert [(s.src, s.phase) for s in crossing][:1] == [("a.weight", "forward")]
    assert [s.phase for s in crossing] == ["forward", "update"]
    assert all(program.params["a.weight"].holds(r) == (r == 0) for r in (0, 1))


def test_gradients_of_one_layout_are_added_before_they_are_summed() -> None:
    graph = tied()
    program = lower(graph, Plan(Grid((2,)), {n.name: {"N": (0,)} for n in graph.ops}), 4)
    summed = [s.src for s in program.moves if s.move.kind == "allreduce" and "weight:grad" in s.src]
    assert len(summed) == 2  # a with c, and b


@pytest.mark.parametrize("procs", [1, 2, 3])
@pytest.mark.parametrize("micros", [1, 2])
def test_gradients_of_batches_are_added(procs: int, micros: int) -> None:
    """Two batches whose gradients are accumulated are one batch of both."""
    graph, rng = shared_network(norm=False), np.random.default_rng(procs)
    feeds = samples(graph, 4, rng)
    pipeline = Pipeline(micro_batches=micros) if micros > 1 else None
    plan = random_plan(graph, 2, Grid.of(procs), rng, pipeline=pipeline)
    world, held = VirtualWorld(plan.grid), [dict[str, np.ndarray]() for _ in range(procs)]
    programs = [lower(graph, plan, 2, keep=True, gradients=g) for g in ("accumulate", "last")]
    states = [initial_state(graph.params(), programs[0].params, r, 1, np.dtype(float)) for r in range(procs)]
    want = serial(graph, 4, feeds, rate=0.1, input_grad=False)
    for i, program in enumerate(programs):
        executors = [
            Executor(program, NumpyEngine(np.float64), world.transport(r), states[r], held[r]) for r in range(procs)
        ]
        for e in executors:
            e.micro_batch.weight, e.on_update = 0.5, descent(0.1)
        part = {name: a[2 * i : 2 * i + 2] for name, a in feeds.items()}
        run_lockstep(executors, [local_feeds(program, r, part) for r in range(procs)])
    assert not any(held)
    for r, own in enumerate(states):
        for name, array in own.items():
            layout = programs[0].params[name]
            np.testing.assert_allclose(array, cut(layout.box(r), want.state(name)), atol=1e-12, err_msg=name)
