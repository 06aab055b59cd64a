"""Step time with overlap on two queues."""

from __future__ import annotations

import pytest

from lbpar.cost.machine import Machine, find_machine
from lbpar.cost.price import Price, StepPrice, price
from lbpar.cost.simulate import simulate
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.loops import Kernel
from lbpar.layout.grid import Grid
from lbpar.layout.layout import Layout
from lbpar.layout.transition import Move
from lbpar.plan.strategies import STRATEGIES, strategy_plan
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Compute, Program, Start, Step, Wait
from tests.cost.nets import even

MACHINE = find_machine("perlmutter-a100")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_overlap_lies_between_the_longer_queue_and_the_sum(strategy: str) -> None:
    graph = even()
    program = lower(graph, strategy_plan(strategy, graph, Grid.of(4), 8), 8)
    priced = price(program, MACHINE)
    got = simulate(program, priced, MACHINE)
    assert got.compute == pytest.approx(priced.compute_seconds)
    assert got.communication == pytest.approx(priced.move_seconds)
    assert max(got.compute, got.communication) <= got.seconds <= priced.seconds * (1 + 1e-12)


def test_a_machine_without_overlap_takes_the_sum() -> None:
    graph = even()
    laptop = find_machine("laptop")
    program = lower(graph, strategy_plan("data", graph, Grid.of(4), 8), 8)
    priced = price(program, laptop)
    assert simulate(program, priced, laptop).seconds == pytest.approx(priced.seconds)


def priced(*steps: Step | tuple[Step, float]) -> tuple[Program, Price]:
    """A program of these steps, of which moves and kernels take so many seconds."""
    pairs = [s if isinstance(s, tuple) else (s, 0.0) for s in steps]
    kinds = ["allreduce" if isinstance(s, Start) else "compute" for s, _ in pairs]
    costs = [StepPrice(kind, "n", "forward", t) for kind, (_, t) in zip(kinds, pairs, strict=True)]
    graph = GraphBuilder((4,))
    program = Program(graph.build(graph.relu(graph.input)), Plan(Grid()), 1, tuple(s for s, _ in pairs), {}, {}, {})
    return program, Price(tuple(costs))


def compute(name: str) -> Compute:
    return Compute(name, Kernel("add", (), (), ()), (), (), "forward")


def start(name: str) -> Start:
    layout = Layout.replicated(Grid((2,)), (4,))
    return Start(Move("allreduce", layout, layout, (0,)), f"{name}:part", name, "n", "forward")


def test_a_move_runs_beside_kernels_until_it_is_waited_for() -> None:
    """Kernels of 1, 2 and 4 s; a move of 5 s that starts after the first and is waited for before the last: 1 + 5 + 4."""
    program, cost = priced(
        (compute("a"), 1.0), (start("m"), 5.0), (compute("b"), 2.0), Wait("m", "forward"), (compute("c"), 4.0)
    )
    got = simulate(program, cost, MACHINE)
    assert (got.seconds, got.compute, got.communication, got.exposed) == (10.0, 7.0, 5.0, 3.0)


def test_moves_run_one_after_the_other() -> None:
    """Two moves of 3 s from the start, kernels of 1 and 1 s after each: 3 + 1, then 6 + 1."""
    program, cost = priced(
        (start("m"), 3.0),
        (start("n"), 3.0),
        Wait("m", "forward"),
        (compute("a"), 1.0),
        Wait("n", "forward"),
        (compute("b"), 1.0),
    )
    assert simulate(program, cost, MACHINE).seconds == 7.0


def test_a_step_is_not_over_before_its_last_move() -> None:
    program, cost = priced((compute("a"), 1.0), (start("m"), 3.0), (compute("b"), 1.0))
    assert simulate(program, cost, MACHINE).seconds == 4.0


def test_a_machine_that_overlaps_half_lies_half_way() -> None:
    half = Machine(MACHINE.file.model_copy(update={"overlap": 0.5}))
    program, cost = priced((start("m"), 3.0), (compute("a"), 5.0), Wait("m", "forward"))
    assert simulate(program, cost, half).seconds == 0.5 * 5.0 + 0.5 * 8.0
