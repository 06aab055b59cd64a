"""Layers that share parameters, as the planner prices them."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.cost.machine import find_machine
from lbpar.cost.price import price
from lbpar.errors import PlanError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.plan.choose import plan_of
from lbpar.plan.priced import Settings
from lbpar.plan.pricing import Pricing
from lbpar.plan.stage_search import StageSearch, weights
from lbpar.plan.stages import stage_plan
from lbpar.plan.tables import build_tables
from lbpar.program.lowering import lower
from lbpar.program.order import BUCKET_BYTES
from lbpar.program.plan import Pipeline, Plan
from lbpar.solver.stretches import cut_and_choose
from tests.plan.test_stage_search import least

MACHINE = find_machine("abci-v100")


def tied(filters: int = 64, norm: bool = False) -> Graph:
    """A convolution at both ends with the same weights, of which there are many."""
    g = GraphBuilder(input=(4, 4, filters))
    x = g.conv(g.input, filters, 3, pad=1, bias=False, name="a")
    x = g.norm(x, name="n") if norm else x
    x = g.conv(g.max_pool(x, 2, name="pool"), filters, 3, pad=1, bias=False, name="b")
    x = g.conv(x, filters, 3, pad=1, bias=False, name="c", share="a")
    x = g.norm(x, name="m", share="n") if norm else x
    return g.build(x).with_loss(LOSSES["mse"]())


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_the_objective_is_the_price_of_the_program(sizes: tuple[int, ...]) -> None:
    """Of random plans; moves of the weights and of their gradients are a large part of it. That these may travel in messages with others is
    not in the tables, so that a start too many is."""
    graph, grid, rng = tied(256), Grid(sizes), np.random.default_rng(0)
    tables = build_tables(graph, 8, Pricing(MACHINE, grid))
    seen, off = 0, []
    for _ in range(40):
        choice = {n: int(rng.integers(len(t.grids))) for n, t in tables.nodes.items()}
        program = lower(graph, plan_of(tables, choice, grid), 8, bucket_bytes=BUCKET_BYTES)
        seen += any("a.weight" in s.src and "grad" not in s.src for s in program.moves)
        off.append(tables.total(choice) / price(program, MACHINE).seconds - 1)
    assert seen > 5 and min(off) > -0.015 and max(off) < 0.05 and np.median(np.abs(off)) < 0.01, off


def test_the_search_with_stages_finds_the_best_of_all_plans() -> None:
    settings = Settings(tied(), 8, MACHINE, "float32", "momentum")
    search = StageSearch(settings, 4, 2, 4)
    most, every = weights("1f1b", 4)
    found = cut_and_choose(search.network, 2, most, every)
    assert found.gap == 0 and found.total == pytest.approx(least(search.network, 2, most, every), rel=1e-9)
    plan = search.plan("1f1b")
    assert plan.priced.program.plan.pipeline is not None


@pytest.mark.parametrize(("norm", "schedule"), [(True, "1f1b"), (False, "delayed")])
def test_stages_that_may_not_share_do_not(norm: bool, schedule: str) -> None:
    """Running statistics, and gradients that are delayed."""
    graph = tied(norm=norm)
    settings = Settings(graph, 8, MACHINE, "float32", "momentum")
    search = StageSearch(settings, 4, 2, 1 if schedule == "delayed" else 4)
    one, other = ("n", "m") if norm else ("a", "c")
    with pytest.raises(PlanError, match="search"):  # a border between them
        search.plan(schedule, given={"pool": 0, "b": 1})  # type: ignore[arg-type]
    inner = Plan(Grid(), {})
    found = search.plan(schedule).priced.plan  # type: ignore[arg-type]
    for plan in (found, stage_plan(inner, graph, 2, 2, MACHINE, schedule=schedule)):  # type: ignore[arg-type]
        assert plan.pipeline is not None and plan.pipeline.stages[one] == plan.pipeline.stages[other]
        plan.check(graph, 8)


def test_bad_stages_are_refused() -> None:
    graph = tied(norm=True)
    names = [n.name for n in graph.ops]
    late = {n: int(i > 3) for i, n in enumerate(names)}
    with pytest.raises(
        PlanError, match="shares parameters with n of stage 0, which with their running statistics must be in one"
    ):
        Plan(Grid((2,)), {}, Pipeline((0,), late)).check(graph, 8)
    graph = tied()
    names = [n.name for n in graph.ops]
    late = {n: int(i > 2) for i, n in enumerate(names)}
    Plan(Grid((2,)), {}, Pipeline((0,), late)).check(graph, 8)
    with pytest.raises(
        PlanError, match="shares parameters with a of stage 0, which with delayed gradients must be in one"
    ):
        Plan(Grid((2,)), {}, Pipeline((0,), late, "delayed")).check(graph, 8)
    g = GraphBuilder(input=(4, 4, 2))
    x, y = g.conv(g.input, 2, 1, name="x"), g.conv(g.input, 2, 1, name="y", share="x")
    side = g.build(g.add([x, y], name="sum")).with_loss(LOSSES["mse"]())
    stages = {"x": 1, "y": 0, "sum": 1, "loss": 1}
    with pytest.raises(
        PlanError, match="y is in stage 0, but shares parameters with x of stage 1, which has them; put it"
    ):
        Plan(Grid((2,)), {}, Pipeline((0,), stages)).check(side, 8)
