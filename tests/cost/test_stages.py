"""Step time and memory of stages: against the formulas of the schedules, and against what a rank holds."""

from __future__ import annotations

import pytest

from lbpar.cost.machine import find_machine
from lbpar.cost.memory import memory, memory_of_stages
from lbpar.cost.price import Price, StepPrice
from lbpar.cost.simulate import Simulation, simulate
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Pipeline, Plan, Schedule
from lbpar.program.steps import Compute, Program, Start

MACHINE = find_machine("perlmutter-a100")


def chain(layers: int) -> Graph:
    g = GraphBuilder(input=(8, 8, 16))
    x = g.input
    for i in range(layers):
        x = g.conv(x, 16, 3, pad=1, bias=False, name=f"c{i}")
    return g.build(x).with_loss(LOSSES["mse"]())


def program(places: int, micros: int, schedule: Schedule, each: int = 1, layers: int = 0) -> Program:
    graph = chain(layers or places * each)
    convs = len(graph.ops) - 1
    stages = {f"c{i}": i * places * each // convs for i in range(convs)} | {"loss": places * each - 1}
    plan = Plan(Grid((places,)), {}, Pipeline((0,), stages, schedule, micros))
    return lower(graph, plan, 4 * micros, input_grad=True)


def simulated(p: Program) -> Simulation:
    """Every convolution, its gradient and that of its weights take a second, all else nothing."""
    steps = []
    for s in p.steps:
        work = isinstance(s, Compute) and s.kernel.name.startswith("conv")
        kind = s.move.kind if isinstance(s, Start) else "compute" if isinstance(s, Compute) else "none"
        steps.append(StepPrice(kind, "", "forward", float(work)))
    return simulate(p, Price(tuple(steps)), MACHINE)


@pytest.mark.parametrize(("places", "micros"), [(1, 3), (2, 4), (3, 6), (4, 8), (8, 16)])
def test_step_time_is_that_of_the_formula(places: int, micros: int) -> None:
    work = 3 * micros
    for schedule in ("gpipe", "1f1b"):
        found = simulated(program(places, micros, schedule))
        assert found.seconds == work + 3 * (places - 1) and found.busy == (work,) * places
        assert found.bubble == pytest.approx((places - 1) / (micros + places - 1))
    assert simulated(program(places, micros, "zero-bubble")).seconds == work + places - 1
    assert simulated(program(places, micros, "interleaved", 2)).seconds == 2 * work + 3 * (places - 1)


def test_stages_keep_activations_of_as_many_micro_batches_as_the_schedule_says() -> None:
    """Counted in arrays of a micro-batch, of stages of two convolutions. Of 1F1B the stages keep what both read of 4, 3, 2 and 1
    micro-batches, and the array that is just made. The whole batch's input lies in the first stage, its target in the last."""
    array, micros = 4 * 8 * 8 * 16 * 4, 16
    found = [m.activations // array for m in memory_of_stages(program(4, micros, "1f1b", layers=8))]
    assert found == [micros + 4 + 1, 2 * 3 + 1, 2 * 2 + 1, micros + 2 * 1 + 2]
    p = program(4, micros, "gpipe", layers=8)
    found = [m.activations // array for m in memory_of_stages(p)]
    assert found == [micros + micros + 1, 2 * micros + 1, 2 * micros + 1, micros + 3 * micros + 1]
    assert memory(p).peak == max(m.peak for m in memory_of_stages(p))


def test_weights_are_those_of_a_stage() -> None:
    p = program(4, 4, "1f1b", layers=8)
    whole = sum(q.size for q in p.graph.params().values()) * 4
    assert [m.weights for m in memory_of_stages(p)] == [whole // 4] * 4
    assert [m.optimizer for m in memory_of_stages(p)] == [whole // 4] * 4
