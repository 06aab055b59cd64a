"""Programs: what they keep, when they start and wait, what they hold of a parameter, and options that change no result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.layout.runs import box_size
from lbpar.plan.strategies import STRATEGIES, strategy_plan
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Compute, Free, Start, Step, Update, Wait, reads, writes
from lbpar.runtime.executor import Executor, run_lockstep
from lbpar.transport.virtual import VirtualWorld
from tests.program.nets import BATCH, network
from tests.util.graphs import random_graph
from tests.util.run import cut, descent, local_feeds, random_plan, random_state, run, samples, serial


@pytest.fixture(params=sorted(STRATEGIES))
def plan(request: pytest.FixtureRequest) -> Plan:
    return strategy_plan(request.param, network(), Grid((2, 2)), BATCH)


# Memory.


def split_of(plan: Plan, graph: Graph, param: str) -> int:
    """Ways in which a plan cuts a parameter: those of the loops that index it."""
    node, _, _ = param.rpartition(".")
    loops = {loop for i in graph.params()[param].dims for loop in i.loops}
    return plan.grid.ways(tuple(a for loop, axes in plan[node].items() if loop in loops for a in axes))


def test_parameters_and_gradients_live_only_where_the_plan_puts_them(plan: Plan) -> None:
    """Split G ways, a rank holds 1/G of the weights, of every copy of their gradients, and so of the optimizer's state."""
    graph = network()
    program = lower(graph, plan, BATCH)
    for name, param in graph.params().items():
        ways = split_of(plan, graph, name)
        held = [b for buffer, b in program.buffers.items() if buffer.split("@")[0] in (name, f"{name}:grad")]
        assert program.params[name] == program.buffers[name].layout
        for rank in range(plan.grid.size):
            assert {box_size(b.layout.box(rank)) for b in held} == {param.size // ways}, name


def test_updates_see_blocks_only(plan: Plan) -> None:
    graph = network()
    done = run(graph, plan, BATCH, samples(graph, BATCH, np.random.default_rng(0)), keep=False)
    seen: list[dict[str, tuple[int, ...]]] = []
    for e in done.executors:
        e.on_update = lambda params, grads: seen.append({k: (p.size, grads[k].size) for k, p in params.items()})
    feeds = samples(graph, BATCH, np.random.default_rng(0))
    run_lockstep(done.executors, [local_feeds(done.program, r, feeds) for r in range(4)])
    for sizes in seen:
        assert {k for k in sizes} == {k for k, p in graph.params().items() if p.kind != "statistic"}
        for name, (p, g) in sizes.items():
            assert p == g == graph.params()[name].size // split_of(plan, graph, name)


@pytest.mark.parametrize("seed", range(15))
def test_no_array_is_larger_than_its_readers_and_writers_need(seed: int) -> None:
    """Every array is one that a kernel reads or writes by its loops, or a stop on the way that is no larger than both ends."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng)
    plan = random_plan(graph, 3, Grid.of(int(rng.choice([2, 3, 4, 6, 8]))), rng)
    program = lower(graph, plan, 3, input_grad=True)
    direct: dict[str, set[str]] = {"kernel": set(program.params)}
    for step in program.steps:
        if not isinstance(step, (Start, Wait, Free)):
            direct["kernel"] |= {*reads(step), *writes(step)}
    ends = direct["kernel"] | set(program.results.values())
    for start in program.moves:
        if start.dst in ends or start.move.kind == "accumulate":  # its result is the plain blocks of the same axes
            continue
        near = [start.src, *(s.dst for s in program.moves if s.src == start.dst)]
        for r in range(plan.grid.size):
            size = box_size(start.move.dst.box(r))
            assert size <= max(box_size(program.buffers[b].layout.box(r)) for b in near), start.dst


@pytest.mark.parametrize("strategy", ["data", "spatial"])
def test_no_rank_builds_a_global_activation(strategy: str) -> None:
    """Four ways of samples, or of rows and columns with a ghost on each side: never the whole."""
    graph = network()
    plan = strategy_plan(strategy, graph, Grid((2, 2)), BATCH)
    program = lower(graph, plan, BATCH)
    shapes = graph.shapes(BATCH)
    for name, info in program.buffers.items():
        node, _, kind = name.split("@")[0].partition(":")
        if kind in ("y", "dy", "dx0", "dx1") and node in shapes and len(shapes[node]) == 4:
            for r in range(4):
                local = info.layout.local_shape(r)
                if strategy == "data":
                    assert local[0] == BATCH // 4
                elif node != "flat":
                    assert max(local[1], local[2]) <= 8 // 2 + 1 and local[1] * local[2] < np.prod(
                        info.layout.shape[1:3]
                    )


# Options.


def run_micro(graph: Graph, plan: Plan, sizes: list[int], feeds: dict[str, np.ndarray], state: Any) -> list[Executor]:
    """One update from several micro-batches: all but the last keep their gradients."""
    world, total = VirtualWorld(plan.grid), sum(sizes)
    states: list[Any] = []
    held: list[dict[str, Any]] = [{} for _ in range(plan.grid.size)]
    first, executors = 0, []
    for k, n in enumerate(sizes):
        program = lower(graph, plan, n, gradients="last" if k == len(sizes) - 1 else "accumulate")
        part = {name: a[first : first + n] for name, a in feeds.items()}
        first += n
        if not states:
            states = [{m: cut(x.box(r), state[m]) for m, x in program.params.items()} for r in range(plan.grid.size)]
        executors = []
        for r in range(plan.grid.size):
            e = Executor(program, NumpyEngine(np.float64), world.transport(r), states[r], held[r])
            e.micro_batch.weight, e.micro_batch.number, e.on_update = n / total, k, descent(0.1)
            executors.append(e)
        run_lockstep(executors, [local_feeds(program, r, part) for r in range(plan.grid.size)])
        world.check_idle()
    assert all(not h for h in held), "nothing is kept after the last"
    return executors


@pytest.mark.parametrize("sizes", [[4, 4], [3, 3, 2], [8]], ids=str)
def test_micro_batches_equal_one_batch(sizes: list[int]) -> None:
    graph, rng = network(norm=False), np.random.default_rng(0)
    feeds, state = samples(graph, BATCH, rng), random_state(graph, rng)
    want = serial(graph, BATCH, feeds, state=state, rate=0.1)
    for plan in (strategy_plan(s, graph, Grid((2, 2)), BATCH) for s in STRATEGIES):
        for r, e in enumerate(run_micro(graph, plan, sizes, feeds, state)):
            for name, block in e.state.items():
                part = cut(e.program.params[name].box(r), want.state(name))
                np.testing.assert_allclose(block, part, rtol=1e-11, atol=1e-12, err_msg=name)


def test_gradients_are_sent_once_for_all_micro_batches() -> None:
    """leggedrobotics/rsl_rl #228, NVIDIA/apex #1175: accumulate, then send."""
    graph = network(norm=False)
    plan = strategy_plan("data", graph, Grid((4,)), BATCH)
    first, last = (lower(graph, plan, BATCH, gradients=g) for g in ("accumulate", "last"))
    assert not [m for m in first.moves if ":grad" in m.src] and not [s for s in first.steps if isinstance(s, Update)]
    sent = [m.src for m in last.moves if ":grad" in m.src]
    assert sorted(sent) == sorted(f"{k}:grad" for k in graph.params())


def test_inference_has_neither_backward_nor_dropout() -> None:
    g = GraphBuilder(input=(6,))
    graph = g.build(g.linear(g.dropout(g.input, 0.5), 4)).with_loss(LOSSES["cross_entropy"]())
    program = lower(graph, Plan(Grid((2,)), {}), 4, training=False)
    assert {s.phase for s in program.steps if isinstance(s, Compute)} == {"forward"}
    assert "dropout" not in {s.kernel.name for s in program.steps if isinstance(s, Compute)}
    assert {"loss", "hits", "output"} == set(program.results)


@pytest.mark.parametrize("split", [{"C": (0,)}, {"F": (0,)}, {"N": (0,)}])
def test_the_output_of_inference_is_complete(split: dict[str, tuple[int, ...]]) -> None:
    """Without a loss nobody else asks for the sum over split channels."""
    g = GraphBuilder(input=(6,))
    graph, rng = g.build(g.linear(g.input, 4, name="fc")), np.random.default_rng(0)
    feeds, state = samples(graph, 4, rng), random_state(graph, rng)
    got = run(graph, Plan(Grid((3,)), {"fc": split}), 4, feeds, state=state, training=False)
    layout = got.program.buffers[got.program.results["output"]].layout
    assert not layout.partial
    want = feeds["input"] @ state["fc.weight"].T + state["fc.bias"]
    np.testing.assert_allclose(got.array(got.program.results["output"]), want, rtol=1e-12)


def test_ops_without_a_grid_run_replicated() -> None:
    graph = network()
    program = lower(graph, Plan(Grid((2, 3)), {}), BATCH)
    assert not program.moves


def test_what_the_loss_does_not_need_is_not_computed() -> None:
    """The first layer's dx, unless asked for; layers without weights before it have no backward pass at all."""
    g = GraphBuilder(input=(6, 6, 2))
    x = g.conv(g.relu(g.input, name="relu"), 3, 3, name="conv")
    graph = g.build(g.global_avg_pool(x)).with_loss(LOSSES["mse"]())
    for wanted in (False, True):
        program = lower(graph, Plan(Grid(), {}), 2, input_grad=wanted)
        names = {s.kernel.name for s in program.steps if isinstance(s, Compute)}
        assert ("conv_backward_data" in names) == ("relu_backward" in names) == wanted


def test_every_rank_has_the_same_steps() -> None:
    """A program is made without a rank: what differs is looked up in layouts."""
    graph = network()
    plan = strategy_plan("stationary-w", graph, Grid((2, 2)), BATCH)
    a, b = lower(graph, plan, BATCH), lower(graph, plan, BATCH)
    steps: tuple[Step, ...] = a.steps
    assert steps == b.steps and a.buffers == b.buffers


def fan_out() -> Graph:
    """One tensor read by two convolutions and an activation."""
    g = GraphBuilder(input=(4, 4, 4))
    x = g.conv(g.input, 4, 1, bias=False, name="stem")
    a, b = g.conv(x, 4, 3, pad=1, bias=False, name="a"), g.conv(x, 4, 1, bias=False, name="b")
    return g.build(g.add([a, b, g.sigmoid(x, name="c")], name="sum")).with_loss(LOSSES["mse"]())


def test_sums_are_made_once_for_all_readers() -> None:
    """A value whose channels' sum one reader had made is not summed again for the next."""
    split = {"stem": {"C": (0,)}} | {n: {} for n in ("a", "b", "c", "sum")}
    moves = [m for m in lower(fan_out(), Plan(Grid((2,)), split), 2).moves if m.src == "stem:y"]
    assert [m.move.kind for m in moves] == ["allreduce"]


def test_partial_gradients_are_added_before_they_are_summed_over_ranks() -> None:
    split = {"a": {"F": (0,)}, "b": {"F": (0,)}}
    program = lower(fan_out(), Plan(Grid((2,)), split), 2)
    sums = [m for m in program.moves if m.phase == "backward" and m.move.kind == "allreduce" and ":grad" not in m.src]
    assert [m.src for m in sums] == ["stem:dy"], "one sum for both readers that split their filters"
