"""Delayed gradients: any stages give what a serial loop over old weights gives, written out in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain as joined
from typing import Any

import numpy as np
import pytest

from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.order import BUCKET_BYTES
from lbpar.program.plan import Pipeline, Plan
from lbpar.runtime.binding import MicroBatch
from lbpar.runtime.delayed import Pipe
from lbpar.runtime.executor import Executor
from lbpar.transport.single import SingleTransport
from lbpar.transport.virtual import VirtualWorld
from tests.util.run import Arrays, cut, descent, join, local_feeds, random_state, samples

WIDTHS = (3, 5, 6, 4, 7, 2)
LAYERS = len(WIDTHS) - 1
BATCH, RATE, COUNT = 6, 0.3, 9
UpdateRule = Callable[[Mapping[str, Any], Mapping[str, Any]], None]


def chain() -> Graph:
    """Linear layers with rectifiers between them; every weight has a shape of its own."""
    g = GraphBuilder(input=(WIDTHS[0],))
    x = g.input
    for i, width in enumerate(WIDTHS[1:]):
        x = g.linear(x, width, bias=False, name=f"fc{i}")
        x = g.relu(x, name=f"r{i}") if i < LAYERS - 1 else x
    return g.build(x).with_loss(LOSSES["mse"]())


def stages_of(graph: Graph, count: int) -> dict[str, int]:
    """Stage of each layer: a rectifier is in that of its linear layer."""
    return {n.name: int(n.name[-1]) * count // LAYERS if n.name[-1].isdigit() else count - 1 for n in graph.ops}


def serial(state: Arrays, feeds: list[Arrays], stages: Mapping[str, int], count: int) -> tuple[Arrays, list[float]]:
    """Stage k of K, from 1 on, is updated with the gradient at weights that K - k updates have changed since."""
    history = {name: [w.copy()] for name, w in state.items()}
    losses = []
    for i, batch in enumerate(feeds):
        used = {n: history[n][max(0, i - (count - 1 - stages[n.partition(".")[0]]))] for n in state}
        inputs, x = [], batch["input"]
        for layer in range(LAYERS):
            inputs.append(x)
            x = x @ used[f"fc{layer}.weight"].T
            x = np.maximum(x, 0) if layer < LAYERS - 1 else x
        losses.append(float(np.mean((x - batch["target"]) ** 2)))
        d = 2 * (x - batch["target"]) / x.size
        for layer in reversed(range(LAYERS)):
            name = f"fc{layer}.weight"
            gradient, d = d.T @ inputs[layer], d @ used[name]
            d = d * (inputs[layer] > 0)
            history[name].append(history[name][-1] - RATE * gradient)
    return {n: h[-1] for n, h in history.items()}, losses


class Ran:
    """Some mini-batches through stages on virtual ranks, drained at the end or also in between."""

    def __init__(
        self,
        plan: Plan,
        feeds: list[Arrays],
        state: Arrays,
        *,
        drain: int = 0,
        engine: Callable[[int], Any] = lambda rank: NumpyEngine(np.float64),
        rule: Callable[[int], UpdateRule] = lambda rank: descent(RATE),
        watch: Callable[[int, Executor], None] = lambda rank, executor: None,
    ) -> None:
        graph = chain()
        self.losses: list[list[float]] = [[] for _ in range(plan.grid.size)]
        self.program = program = lower(graph, plan, BATCH, bucket_bytes=BUCKET_BYTES)
        world = VirtualWorld(plan.grid)

        def one(transport: Any) -> dict[str, np.ndarray]:
            rank = transport.rank
            own = {n: cut(program.params[n].box(rank), a) for n, a in state.items()}
            count = len(program.rounds)
            slots = [Executor(program, engine(rank), transport, own) for _ in range(count)]
            pipe, update = Pipe(count), rule(rank)

            def go(*entering: Any) -> None:
                left = pipe.go(*entering)
                if left is not None:
                    self.losses[rank].append(float(left.value("loss")))
                    left.arrays = {}

            for i, batch in enumerate(feeds):
                e = slots[i % count]
                e.micro_batch, e.on_update = MicroBatch(1, i), update
                go(e, local_feeds(program, rank, batch))
                watch(rank, e)
                if drain and (i + 1) % drain == 0:
                    while len(pipe):
                        go()
            while len(pipe):
                go()
            return own

        blocks = world.run(one)
        world.check_idle()
        self.state = {n: join(program.params[n], [b[n] for b in blocks]) for n in state}


def made(seed: int = 0, count: int = COUNT) -> tuple[Arrays, list[Arrays]]:
    rng, graph = np.random.default_rng(seed), chain()
    return random_state(graph, rng), [samples(graph, BATCH, rng) for _ in range(count)]


def staged(count: int, inside: int = 1) -> Plan:
    graph = chain()
    ops = {n.name: {"N": (0,)} for n in graph.ops} if inside > 1 else {}
    sizes = (inside, count) if inside > 1 else (count,)
    return Plan(Grid(sizes), ops, Pipeline((len(sizes) - 1,), stages_of(graph, count), "delayed"))


@pytest.mark.parametrize(("count", "inside"), [(2, 1), (3, 1), (4, 1), (5, 1), (2, 2), (3, 2)])
def test_stages_give_what_a_serial_loop_over_old_weights_gives(count: int, inside: int) -> None:
    state, feeds = made()
    want, losses = serial(state, feeds, stages_of(chain(), count), count)
    got = Ran(staged(count, inside), feeds, state)
    for found in got.losses:
        np.testing.assert_allclose(found, losses, rtol=1e-12)
    for name, w in want.items():
        np.testing.assert_allclose(got.state[name], w, rtol=1e-11, atol=1e-13, err_msg=name)
    exact, _ = serial(state, feeds, dict.fromkeys(stages_of(chain(), count), count - 1), count)
    assert any(np.abs(exact[n] - want[n]).max() > 1e-3 for n in want), "the delay made no difference"


def test_a_drained_pipe_starts_with_fresh_weights() -> None:
    """Mini-batches between two drains are a run of their own."""
    state, feeds = made()
    for part in (feeds[:4], feeds[4:8], feeds[8:]):
        state, _ = serial(state, part, stages_of(chain(), 3), 3)
    start, _ = made()
    got = Ran(staged(3), feeds, start, drain=4)
    for name, w in state.items():
        np.testing.assert_allclose(got.state[name], w, rtol=1e-11, atol=1e-13, err_msg=name)


def test_fewer_mini_batches_than_stages() -> None:
    state, feeds = made(count=2)
    want, losses = serial(state, feeds, stages_of(chain(), 4), 4)
    got = Ran(staged(4), feeds, state)
    assert got.losses[0] == pytest.approx(losses)
    for name, w in want.items():
        np.testing.assert_allclose(got.state[name], w, rtol=1e-11, atol=1e-13, err_msg=name)


def test_one_stage_is_the_plain_step_to_the_last_bit() -> None:
    state, feeds = made()
    graph = chain()
    one = Plan(Grid((2,)), {n.name: {"N": (0,)} for n in graph.ops}, Pipeline((), stages_of(graph, 1), "delayed"))
    got, plain = Ran(one, feeds, state), Ran(Plan(one.grid, one.ops), feeds, state)
    assert got.losses == plain.losses
    for name in state:
        np.testing.assert_array_equal(got.state[name], plain.state[name])


class Recording(NumpyEngine):
    """Notes which weights products see."""

    def __init__(self, log: list[tuple[str, np.ndarray]]) -> None:
        super().__init__(np.float64)
        self.log = log

    def linear_forward(self, x: Any, w: Any, b: Any) -> Any:
        self.log.append(("forward", w.copy()))
        return super().linear_forward(x, w, b)

    def linear_backward_data(self, dy: Any, w: Any) -> Any:
        self.log.append(("backward", w.copy()))
        return super().linear_backward_data(dy, w)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_stage_k_of_K_applies_gradients_that_are_K_minus_k_updates_old(count: int) -> None:
    """Recorded: the version of the weights that each pass of a mini-batch saw, beside the number of updates before its own."""
    state, feeds = made()
    logs: dict[int, list[tuple[str, np.ndarray]]] = {r: [] for r in range(count)}
    versions: list[dict[str, list[np.ndarray]]] = [{} for _ in range(count)]

    def rule(rank: int) -> UpdateRule:
        def update(params: Mapping[str, Any], grads: Mapping[str, Any]) -> None:
            for name, p in params.items():
                history = versions[rank].setdefault(name, [p.copy()])
                descent(RATE)({name: p}, grads)
                history.append(p.copy())

        return update

    Ran(staged(count), feeds, state, engine=lambda rank: Recording(logs[rank]), rule=rule)
    stages = stages_of(chain(), count)
    for name in state:
        stage = stages[name.partition(".")[0]]
        history = versions[stage][name]
        assert len(history) == len(feeds) + 1
        for kind in ("forward", "backward"):
            seen = [
                next(v for v, w in enumerate(history) if w.shape == used.shape and (w == used).all())
                for what, used in logs[stage]
                if what == kind and used.shape == state[name].shape
            ]
            if kind == "backward" and name == "fc0.weight":
                assert not seen  # nobody wants the gradient of the input
                continue
            ages = [i - v for i, v in enumerate(seen)]  # mini-batch i's own is update i, from 0 on
            assert ages == [min(i, count - (stage + 1)) for i in range(len(feeds))], (name, kind)


@pytest.mark.parametrize("count", [2, 4])
def test_a_stage_keeps_weights_and_activations_of_those_under_way_only(count: int) -> None:
    """Counted behind each round: versions of a weight besides the newest, and mini-batches whose activations are there."""
    state, feeds = made()
    slots: list[list[Executor]] = [[] for _ in range(count)]
    most = [[0, 0] for _ in range(count)]
    stages = stages_of(chain(), count)

    def watch(rank: int, entered: Executor) -> None:
        if entered not in slots[rank]:
            slots[rank].append(entered)
        mine = next(n for n in state if stages[n.partition(".")[0]] == rank)
        kept = {id(e.arrays[mine]) for e in slots[rank] if mine in e.arrays} - {id(entered.state[mine])}
        held = [
            e
            for e in slots[rank]
            if any(b.startswith("r") and b[1].isdigit() and stages[b[:2]] == rank for b in e.arrays)
        ]
        most[rank][0], most[rank][1] = max(most[rank][0], len(kept)), max(most[rank][1], len(held))

    Ran(staged(count), feeds, state, watch=watch)
    # At the end of a round a place has finished one of those that it had.
    assert [m[0] for m in most] == [count - 1 - r for r in range(count)]
    assert [m[1] for m in most] == [count - 1 - r for r in range(count)]


def test_programs_of_delayed_gradients_have_a_round_for_each_stage() -> None:
    plan = staged(3)
    program = lower(chain(), plan, BATCH, bucket_bytes=BUCKET_BYTES)
    assert [*joined.from_iterable(program.rounds)] == [*range(len(program.steps))]
    nodes = [
        {getattr(program.steps[i], "node", "") for i in r if getattr(program.steps[i], "phase", "") == "backward"}
        for r in program.rounds
    ]
    stages = stages_of(chain(), 3)
    for k, found in enumerate(nodes):
        assert {stages[n] for n in found if n in stages and n[:2] == "fc"} <= {2 - k, 1 - k}
    order = [(batch, next(k for k, r in enumerate(program.rounds) if i in r)) for batch, i in program.in_rounds(4)]
    assert list(dict.fromkeys(order)) == [
        (0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (3, 0), (2, 1), (1, 2), (3, 1), (2, 2), (3, 2),
    ]  # fmt: skip
    plain = lower(chain(), Plan(Grid()), BATCH)
    assert list(plain.in_rounds(1)) == [(0, i) for i in range(len(plain.steps))]


def test_a_plain_executor_runs_all_rounds() -> None:
    """One mini-batch alone, on one rank that has both stages' weights, is a plain step."""
    state, feeds = made(count=1)
    plan = Plan(Grid(), {}, Pipeline((), stages_of(chain(), 1), "delayed"))
    program = lower(chain(), plan, BATCH)
    e = Executor(program, NumpyEngine(np.float64), SingleTransport(), {n: a.copy() for n, a in state.items()})
    e.on_update = descent(RATE)
    e.run(local_feeds(program, 0, feeds[0]))
    want, losses = serial(state, feeds, stages_of(chain(), 1), 1)
    assert float(e.value("loss")) == pytest.approx(losses[0])
    for name, w in want.items():
        np.testing.assert_allclose(e.state[name], w, rtol=1e-12)
