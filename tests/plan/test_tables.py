"""The planner's totals against the price of the lowered program, and its choice against brute force through lowering."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from lbpar.cost.machine import Machine, find_machine
from lbpar.cost.price import price
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.loops import Kernel, Shape
from lbpar.graph.ops.losses import LOSSES, CrossEntropy
from lbpar.graph.ops.pointwise import Relu
from lbpar.plan.candidates import planning_grid
from lbpar.plan.choose import choose_plan, plan_of
from lbpar.plan.pricing import Pricing
from lbpar.plan.tables import build_tables, group_nodes
from lbpar.program.lowering import lower
from lbpar.program.order import BUCKET_BYTES
from lbpar.program.plan import Plan
from lbpar.solver.search import minimise
from tests.cost.nets import even, mixed

MACHINE = find_machine("perlmutter-a100")


def chain(kernel: int) -> Graph:
    g = GraphBuilder(input=(16, 16, 8))
    x = g.relu(g.norm(g.conv(g.input, 16, kernel, pad=kernel // 2)))
    x = g.relu(g.max_pool(g.conv(x, 16, kernel, pad=kernel // 2), 2))
    x = g.global_avg_pool(g.conv(x, 32, kernel, pad=kernel // 2))
    x = g.relu(g.linear(x, 32))
    return g.build(g.linear(x, 16)).with_loss(CrossEntropy())


def steps_total(graph: Graph, plan: Plan, batch: int, machine: Machine, dtype: str = "float32") -> float:
    return price(lower(graph, plan, batch, bucket_bytes=BUCKET_BYTES), machine, dtype).seconds


@pytest.mark.parametrize("kernel", [1, 3])
def test_totals_are_the_price_of_the_lowered_program(kernel: int) -> None:
    graph, grid = chain(kernel), planning_grid(8)
    tables = build_tables(graph, 16, Pricing(MACHINE, grid))
    rng, got = np.random.default_rng(0), []
    for _ in range(60):
        choice = {n: int(rng.integers(len(t.grids))) for n, t in tables.nodes.items()}
        got.append(tables.total(choice) / steps_total(graph, plan_of(tables, choice, grid), 16, MACHINE))
    assert np.abs(np.median(got) - 1) < 1e-3
    assert min(got) > 0.99 and max(got) < 1.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_named_strategies_cost_the_same_in_tables_and_as_programs(dtype: str) -> None:
    from lbpar.plan.strategies import STRATEGIES, strategy_plan

    graph, grid = even(), planning_grid(4)
    tables = build_tables(graph, 16, Pricing(MACHINE, grid, dtype))
    seen = 0
    for name in STRATEGIES:
        plan = strategy_plan(name, graph, grid, 16)
        picked = {n: tables.number(n, dict(plan[n])) for n in tables.groups}
        if None not in picked.values():
            seen += 1
            got = tables.total(picked)  # type: ignore[arg-type]
            assert got == pytest.approx(steps_total(graph, plan, 16, MACHINE, dtype), rel=0.01), name
    assert seen >= 2


def test_no_candidate_leaves_a_norm_with_one_value() -> None:
    grid, ways = planning_grid(8), {}
    for stats in ("global", "local"):
        g = GraphBuilder(input=(64,))
        graph = g.build(g.linear(g.norm(g.input, stats=stats, name="n"), 9)).with_loss(CrossEntropy())
        grids = build_tables(graph, 8, Pricing(MACHINE, grid)).nodes["n"].grids
        ways[stats] = {Plan(grid, {"n": g}).ways("n").get("N", 1) for g in grids}
    assert ways == {"global": {1, 2, 4, 8}, "local": {1, 2, 4}}


@pytest.mark.parametrize("machine", ["perlmutter-a100", "laptop", "abci-v100"])
def test_the_choice_is_the_best_of_all_plans_through_lowering(machine: str) -> None:
    """Every combination of candidates of a small network is lowered and priced; none is cheaper."""
    g = GraphBuilder(input=(4, 4, 32))
    x = g.conv(g.input, 64, 1, bias=False)
    x = g.global_avg_pool(x)
    graph = g.build(g.linear(x, 256, bias=False)).with_loss(CrossEntropy())
    m, batch, procs = find_machine(machine), 8, 2
    choice = choose_plan(graph, batch, procs, m, compare=False)
    tables = build_tables(graph, batch, Pricing(m, planning_grid(procs)))
    names = list(tables.nodes)
    best = min(
        steps_total(graph, plan_of(tables, dict(zip(names, numbers, strict=True)), choice.plan.grid), batch, m)
        for numbers in product(*(range(len(tables.nodes[n].grids)) for n in names))
    )
    assert choice.solution.exact
    assert steps_total(graph, choice.plan, batch, m) == pytest.approx(best, rel=1e-6)
    assert choice.solution.total == pytest.approx(best, rel=1e-6)


def test_residuals_and_concats_are_priced() -> None:
    graph, grid = mixed(8, 8), planning_grid(4)
    tables = build_tables(graph, 8, Pricing(MACHINE, grid))
    rng = np.random.default_rng(1)
    for _ in range(20):
        choice = {n: int(rng.integers(len(t.grids))) for n, t in tables.nodes.items()}
        plan = plan_of(tables, choice, grid)
        plan.check(graph, 8)
        got, want = tables.total(choice), steps_total(graph, plan, 8, MACHINE)
        assert got == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize("options", [{}, {"ignore_index": 1, "class_weights": (1.0, 2.0, 0.5), "per_sample": True}])
@pytest.mark.parametrize("machine", ["perlmutter-a100", "laptop"])
def test_further_outputs_rims_and_sums_of_losses_are_priced(machine: str, options: dict[str, Any]) -> None:
    """Also kernels that run over no loop: the sum of a loss's terms."""
    g = GraphBuilder(input=(16, 8, 8, 4))
    x = g.prelu(g.conv(g.input, 8, 3, pad=1, pad_mode="reflect"), per_channel=True)
    low = g.instance_norm(g.conv(x, 8, 3, stride=2, pad=1))
    x = g.add([x, g.upsample(low, 2, "linear")])
    graph = g.build(g.conv(x, 3, 1), {g.conv(low, 3, 1): 0.5}).with_loss(LOSSES["dice_cross_entropy"](**options))
    grid, m = planning_grid(4), find_machine(machine)
    tables = build_tables(graph, 4, Pricing(m, grid))
    rng, ratios = np.random.default_rng(1), []
    for _ in range(12):
        choice = {n: int(rng.integers(len(t.grids))) for n, t in tables.nodes.items()}
        plan = plan_of(tables, choice, grid)
        ratios.append(tables.total(choice) / steps_total(graph, plan, 4, m))
    assert min(ratios) > 0.97 and max(ratios) < 1.03


def test_elementwise_ops_share_the_grid_of_what_they_follow() -> None:
    groups = group_nodes(even(), {})
    assert groups["norm1"] == ["norm1", "relu1"]
    assert all(members[0] == name for name, members in groups.items())
    given = group_nodes(even(), {"relu1": {}})
    assert given["relu1"] == ["relu1"]


def random_network(rng: np.random.Generator) -> Graph:
    """A few layers with a branch that joins again, or none."""
    g = GraphBuilder(input=(int(rng.integers(2, 9)), int(rng.integers(2, 9)), int(rng.integers(1, 9))))
    channels = int(rng.integers(1, 17))
    x = g.conv(g.input, channels, 3, pad=1, bias=False)
    shape = int(rng.integers(3))
    if shape == 0:
        x = g.add([x, g.conv(x, channels, 1, bias=False)])
    elif shape == 1:
        x = g.concat([x, g.conv(x, int(rng.integers(1, 9)), 1, bias=False)])
    else:
        x = g.relu(g.norm(x))
    return g.build(g.linear(g.global_avg_pool(x), int(rng.integers(2, 33)))).with_loss(CrossEntropy())


def test_the_search_agrees_with_brute_force_on_200_random_networks() -> None:
    """All combinations of candidates at once: one axis of an array per group of layers."""
    rng, pricing = np.random.default_rng(7), Pricing(MACHINE, planning_grid(2))
    for _ in range(200):
        graph, batch = random_network(rng), int(rng.integers(1, 9))
        tables = build_tables(graph, batch, pricing)
        names = list(tables.nodes)
        at = {n: i for i, n in enumerate(names)}
        total = np.zeros([len(tables.nodes[n].grids) for n in names])
        for n, t in tables.nodes.items():
            total += t.seconds.reshape([-1 if i == at[n] else 1 for i in range(len(names))])
        for (a, b), e in tables.edges.items():
            matrix = e.full() if at[a] < at[b] else e.full().T
            total += matrix.reshape([total.shape[i] if i in (at[a], at[b]) else 1 for i in range(len(names))])
        solution = minimise({n: t.seconds for n, t in tables.nodes.items()}, tables.edges)
        assert solution.exact and solution.total == pytest.approx(total.min(), rel=1e-12)
        assert solution.space_size == total.size


class First(Relu):
    """A relu that reads the first of its two inputs."""

    no_grad = frozenset({1})

    def infer(self, xs: Sequence[Shape]) -> Shape:
        return super().infer(xs[:1])

    def forward(self, xs: Sequence[Shape], training: bool) -> tuple[Kernel, ...]:
        return super().forward(xs[:1], training)

    def backward(self, xs: Sequence[Shape], wanted: frozenset[str]) -> tuple[Kernel, ...]:
        return super().backward(xs[:1], wanted)


def test_an_input_that_is_never_read_costs_nothing() -> None:
    g = GraphBuilder(input=(8, 8, 8))
    x = g.conv(g.input, 16, 3, pad=1)
    unread = g.sigmoid(g.input)
    x = g.add_op(First(), (x, unread))
    graph = g.build(g.linear(g.global_avg_pool(x), 16)).with_loss(CrossEntropy())
    grid = planning_grid(4)
    tables = build_tables(graph, 8, Pricing(MACHINE, grid))
    (edge,) = (e for (a, b), e in tables.edges.items() if b == x and a != graph[x].inputs[0])
    assert (edge.full() == 0).all()
    assert choose_plan(graph, 8, 4, MACHINE).priced.seconds > 0
    choice = {n: len(t.grids) // 2 for n, t in tables.nodes.items()}
    assert tables.total(choice) == pytest.approx(
        steps_total(graph, plan_of(tables, choice, grid), 8, MACHINE), rel=0.01
    )
