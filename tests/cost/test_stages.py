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


def priced_alike(p: Program) -> Price:
    """Every convolution, its gradient and that of its weights take a second, all else nothing."""
    steps = []
    for s in p.steps:
        work = isinstance(s, Compute) and s.kernel.name.startswith("conv")
        kind = s.move.kind if isinstance(s, Start) else "compute" if isinstance(s, Compute) else "none"
        steps.append(StepPrice(kind, "", "forward", float(work)))
    return Price(tuple(steps))


def simulated(p: Program) -> Simulation:
    return simulate(p, priced_alike(p), MACHINE)


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


@pytest.mark.parametrize("places", [2, 3, 4, 8])
def test_delayed_gradients_leave_no_stage_idle(places: int) -> None:
    """The period is a stage's own work, as in one of K-th of the network; an exact schedule of one batch makes all wait for all."""
    found = simulated(program(places, 1, "delayed"))
    assert found.seconds == pytest.approx(3) and found.busy == pytest.approx((3,) * places)
    assert found.bubble == pytest.approx(0, abs=1e-12)
    assert simulated(program(places, 1, "1f1b")).seconds == 3 * places


def test_the_slowest_stage_sets_the_period() -> None:
    """Of seven convolutions over three stages one has three."""
    p = program(3, 1, "delayed", layers=7)
    found = simulated(p)
    assert sorted(found.busy) == pytest.approx([6, 6, 9])
    assert found.seconds == pytest.approx(9) and found.bubble == pytest.approx(1 - 21 / 27)


def test_what_delayed_gradients_keep_is_counted() -> None:
    """Stage k of K, from 1 on: K - k older versions of its weights, and, at its peak, K - k + 1 batches' activations. Of these stages
    of two convolutions keep what both read, and the array that is just made; the input of all batches under way lies in the first."""
    array, p = 4 * 8 * 8 * 16 * 4, program(4, 1, "delayed", layers=8)
    whole = sum(q.size for q in p.graph.params().values()) * 4
    held = memory_of_stages(p)
    assert [m.weights for m in held] == [n * whole // 4 for n in (4, 3, 2, 1)]
    assert [m.optimizer for m in held] == [whole // 4] * 4
    assert [m.activations // array for m in held[:3]] == [4 + 4 + 1, 2 * 3 + 1, 2 * 2 + 1]
    plain = memory_of_stages(program(4, 1, "1f1b", layers=8))
    assert [m.weights for m in plain] == [whole // 4] * 4
