"""Programs of several micro-batches: their parts, in the schedule's order, with what each of them weighs."""

from __future__ import annotations

import pytest

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Pipeline, Plan, Schedule
from lbpar.program.steps import Accumulate, Compute, Program, Sum, Update

STAGES = {"a": 0, "r": 0, "b": 1, "loss": 1}


def network() -> Graph:
    g = GraphBuilder((6,))
    x = g.relu(g.linear(g.input, 5, bias=False, name="a"), name="r")
    return g.build(g.linear(x, 3, bias=False, name="b")).with_loss(LOSSES["mse"]())


def program(schedule: Schedule = "1f1b", micros: int = 3, batch: int = 7) -> Program:
    plan = Plan(Grid((2,)), {}, Pipeline((0,), STAGES, schedule, micros))
    return lower(network(), plan, batch, fused=False, overlap=False, keep=True)


def tasks(made: Program) -> list[tuple[str, int, int]]:
    """(pass, stage, micro-batch) of kernels in order, repetitions in a row left out."""
    out: list[tuple[str, int, int]] = []
    for s in made.steps:
        if isinstance(s, Compute):
            task = (
                "F" if s.phase == "forward" else "B",
                STAGES[s.node],
                int(s.writes[0].partition("#")[2].partition("@")[0]),
            )
            if out[-1:] != [task]:
                out.append(task)
    return out


def test_arrays_are_those_of_micro_batches_the_first_ones_larger() -> None:
    buffers = program().buffers
    assert [(buffers[f"a:y#{i}"].layout.shape[0], buffers[f"a:y#{i}"].first) for i in range(3)] == [
        (3, 0),
        (2, 3),
        (2, 5),
    ]
    assert "a.weight" in buffers and not any(b.startswith("a.weight#") for b in buffers)


def test_gradients_weigh_by_samples_and_there_is_one_update() -> None:
    steps = program().steps
    weights = {s.grad: s.weight for s in steps if isinstance(s, Accumulate) and s.param == "b.weight"}
    assert sorted(weights.values(), reverse=True) == pytest.approx([3 / 7, 2 / 7, 2 / 7])
    assert [s.last for s in steps if isinstance(s, Accumulate) and s.param == "b.weight"] == [False, False, True]
    assert [i for i, s in enumerate(steps) if isinstance(s, Update)] == [len(steps) - 1]


def test_the_loss_is_the_weighted_sum_of_all_micro_batches() -> None:
    made = program()
    (total,) = (s for s in made.steps if isinstance(s, Sum) and s.dst.startswith("loss:sum"))
    assert [b.partition("#")[2].partition("@")[0] for b in total.srcs] == ["0", "1", "2"]
    assert total.weights == pytest.approx((3 / 7, 2 / 7, 2 / 7))


@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        ("gpipe", ["F0", "F1", "F2", "B0", "B1", "B2"]),
        ("1f1b", ["F0", "B0", "F1", "B1", "F2", "B2"]),
    ],
)
def test_the_last_stage_runs_its_tasks_in_the_schedules_order(schedule: Schedule, order: list[str]) -> None:
    assert [f"{kind}{micro}" for kind, stage, micro in tasks(program(schedule)) if stage == 1] == order


def test_every_task_comes_behind_what_it_needs() -> None:
    for schedule in ("gpipe", "1f1b"):
        at = {task: i for i, task in enumerate(tasks(program(schedule)))}
        for i in range(3):
            assert at["F", 0, i] < at["F", 1, i] < at["B", 1, i] < at["B", 0, i]


def test_a_batch_of_one_sample_is_not_cut() -> None:
    assert not any("#" in b for b in program(batch=1).buffers)
