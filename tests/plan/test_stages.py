"""Stages of run files and plan files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lbpar.config.parallel import ParallelConfig
from lbpar.cost.machine import find_machine
from lbpar.errors import PlanError
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.models.registry import build_model
from lbpar.plan.resolve import resolve_plan, save_plan
from lbpar.plan.stages import chain
from lbpar.plan.strategies import strategy_plan
from lbpar.program.plan import Pipeline, Plan


def branches() -> Graph:
    g = GraphBuilder(input=(8, 8, 4))
    a = g.conv(g.input, 4, 3, pad=1, name="a")
    b = g.conv(a, 4, 3, pad=1, name="b")
    x = g.add([a, b], name="sum")
    return g.build(g.linear(g.flatten(x, name="flat"), 3, name="fc")).with_loss(CrossEntropy())


def test_a_plan_with_stages_is_read_as_it_was_written(tmp_path: Path) -> None:
    graph = branches()
    parallel = ParallelConfig(strategy="data", stages=2, schedule="zero-bubble", micro_batches=3)
    plan = resolve_plan(parallel, graph, 8, 4)
    assert plan.grid == Grid((2, 2)) and plan.pipeline is not None
    assert plan.pipeline.axes == (1,) and plan.pipeline.schedule == "zero-bubble" and plan.micro_batches == 3
    for name in ("plan.yaml", "plan.json"):
        save_plan(plan, tmp_path / name, batch=8)
        again = resolve_plan(ParallelConfig(strategy=str(tmp_path / name)), graph, 8, 4)
        assert again == plan
    given: tuple[dict[str, Any], ...] = (
        {"stages": 2},
        {"schedule": "delayed"},
        {"micro_batches": 3},
        {"interleave": 2},
        {"stage": {"a": 0}},
    )
    for more in given:
        with pytest.raises(PlanError, match=f"parallel.{next(iter(more))}: .* those of the plan file"):
            resolve_plan(ParallelConfig.model_validate({"strategy": str(tmp_path / "plan.yaml")} | more), graph, 8, 4)
    same = ParallelConfig(strategy=str(tmp_path / "plan.yaml"), schedule="zero-bubble")
    assert resolve_plan(same, graph, 8, 4) == plan
    save_plan(replace(plan, pipeline=replace(plan.pipeline, micro_batches=9)), tmp_path / "many.yaml", batch=8)
    with pytest.raises(
        PlanError, match=r"many.yaml: pipeline.micro_batches: got 9 parts of 8 samples, expected at most 8"
    ):
        resolve_plan(ParallelConfig(strategy=str(tmp_path / "many.yaml")), graph, 8, 4)


def test_stages_are_balanced() -> None:
    """No stage of VGG takes more than 1.35 times the mean."""
    graph = build_model("vgg16").with_loss(CrossEntropy())
    plan = resolve_plan(ParallelConfig(strategy="data", stages=4, micro_batches=4), graph, 32, 4)
    assert plan.pipeline is not None
    costs, _ = chain(strategy_plan("data", graph, Grid(), 8), graph, 8, 4, find_machine("laptop"))
    of = plan.pipeline.stages
    seconds = [sum(c for c, n in zip(costs, graph.ops, strict=True) if of[n.name] == s) for s in range(4)]
    assert max(seconds) < 1.35 * sum(seconds) / 4


def test_a_skipped_layer_crosses_its_border() -> None:
    graph = branches()
    inner = strategy_plan("data", graph, Grid((2,)), 4)
    machine = find_machine("perlmutter-a100")
    _, borders = chain(inner, graph, 4, 4, machine)
    link = machine.parts(Grid((2, 4)), (1,))
    one = machine.move_seconds("p2p", link, 4 * 8 * 8 * 4 * 4 / 2, 1.0)
    assert borders[:4] == pytest.approx(
        [0.0, 2 * one, 4 * one, 2 * one]
    )  # before b: a; before the sum: both; then the sum


WRONG = {
    "no stage": (Pipeline((0,), {"a": 0}), "layer b has no stage"),
    "a gap": (Pipeline((0,), {"a": 0, "b": 0, "sum": 2, "flat": 2, "fc": 2, "loss": 2}), "no layer is in stage 1"),
    "backwards": (Pipeline((0,), {"a": 1, "b": 0, "sum": 1, "flat": 1, "fc": 1, "loss": 1}), "backwards along an edge"),
    "too few": (Pipeline((0,), dict.fromkeys(("a", "b", "sum", "flat", "fc", "loss"), 0)), "places for 2"),
    "not interleaved": (
        Pipeline((0,), {"a": 0, "b": 1, "sum": 2, "flat": 2, "fc": 2, "loss": 2}),
        "only schedule inter",
    ),
    "no axis": (Pipeline((3,), {}), "grid axis 3 does not exist"),
    "no schedule": (Pipeline((0,), {}, "best"), "got schedule 'best'"),  # type: ignore[arg-type]
    "parts of delayed batches": (Pipeline((0,), {}, "delayed", 2), "2 micro-batches with schedule delayed"),
    "nothing": (Pipeline((0,), {}, "1f1b", 0), "0 micro-batches"),
    "strange": (
        Pipeline((0,), {"a": 0, "b": 1, "sum": 1, "flat": 1, "fc": 1, "loss": 1, "x": 1}),
        "'x' is not a layer",
    ),
}


@pytest.mark.parametrize(("pipeline", "message"), WRONG.values(), ids=WRONG.keys())
def test_plans_with_bad_stages_are_refused(pipeline: Pipeline, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(Grid((2,)), {}, pipeline).check(branches(), 8)


def test_loops_cannot_use_the_axis_of_the_stages() -> None:
    stages = {"a": 0, "b": 1, "sum": 1, "flat": 1, "fc": 1, "loss": 1}
    with pytest.raises(PlanError, match="has the stages"):
        Plan(Grid((2,)), {"a": {"N": (0,)}}, Pipeline((0,), stages)).check(branches(), 8)
