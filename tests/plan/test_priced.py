"""Plans as they are priced: once each, and beside the same plan that keeps everything."""

from __future__ import annotations

from dataclasses import replace

from lbpar.cost.machine import find_machine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.plan.priced import Settings
from lbpar.program.plan import Plan


def chain() -> Graph:
    g = GraphBuilder((4, 4, 2))
    x = g.conv(g.input, 4, 1, bias=False, name="c")
    for i in range(4):
        x = g.sigmoid(x, name=f"r{i}")
    return g.build(x).with_loss(LOSSES["mse"]())


def settings(**options: object) -> Settings:
    return Settings(chain(), 4, find_machine("laptop"), "float32", "sgd", **options)  # type: ignore[arg-type]


def test_equal_plans_are_lowered_once() -> None:
    s, plan = settings(), Plan(Grid((2,)))
    first = s.priced("a", plan)
    again = s.priced("b", Plan(Grid((2,))))
    assert again.program is first.program and (first.name, again.name) == ("a", "b")
    assert first.kept is None and len(s.known) == 1


def test_a_plan_that_computes_again_knows_what_keeping_would_cost() -> None:
    s, plan = settings(), Plan(Grid(), recompute=("r1", "r2"))
    lean = s.priced("lean", plan)
    assert lean.plan == plan and lean.kept is not None
    assert lean.kept.plan == replace(plan, recompute=()) and lean.kept.program is s.priced("kept", Plan(Grid())).program
    assert lean.price.seconds > lean.kept.price.seconds
    assert sum(p.again for p in lean.price.steps) == 2 and not any(p.again for p in lean.kept.price.steps)


def test_settings_may_say_what_to_compute_again() -> None:
    s = settings(recompute=("r1",))
    assert s.priced("a", Plan(Grid())).plan.recompute == ("r1",)
    assert s.priced("b", Plan(Grid(), recompute=("r2",))).plan.recompute == ("r2",)
