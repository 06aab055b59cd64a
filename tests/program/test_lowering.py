"""Programs: what they keep, when they start and wait, what they hold of a parameter, and options that change no result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.errors import PlanError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.layout.runs import box_size
from lbpar.plan.strategies import STRATEGIES, strategy_plan
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Compute, Free, Program, Start, Step, Update, Wait, reads, writes
from lbpar.runtime.executor import Executor, run_lockstep
from lbpar.runtime.initial import initial_state
from lbpar.transport.virtual import VirtualWorld
from tests.util.graphs import random_graph
from tests.util.run import cut, descent, local_feeds, random_plan, random_state, run, samples, serial

BATCH = 8


def network(norm: bool = True) -> Graph:
    """A small residual network with every kind of parameter; extents divide by 4 where strategies split them."""
    g = GraphBuilder(input=(8, 8, 4))
    x = g.relu(g.conv(g.input, 8, 3, pad=1, name="conv1"), name="relu1")
    y = g.conv(x, 8, 3, pad=1, bias=False, name="conv2")
    y = g.norm(y, name="norm2") if norm else y
    x = g.relu(g.add([x, y], name="sum"), name="relu2")
    x = g.conv(x, 16, 3, stride=2, pad=1, groups=4, name="conv3")
    x = g.linear(g.flatten(g.max_pool(x, 2, name="pool"), name="flat"), 8, name="fc")
    return g.build(x).with_loss(LOSSES["cross_entropy"]())


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


# Order.


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


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown layer": ({"conv9": {"N": (0,)}}, "conv9"),
    "unknown loop": ({"fc": {"H": (0,)}}, "no loop 'H'"),
    "unknown axis": ({"fc": {"N": (5,)}}, "axis 5 does not exist"),
    "axis given twice": ({"fc": {"N": (0,), "F": (0,)}}, "two loops"),
}


@pytest.mark.parametrize(("ops", "text"), BAD.values(), ids=BAD.keys())
def test_plans_that_an_op_cannot_take(ops: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        lower(network(), Plan(Grid((2, 2)), ops), BATCH)


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
