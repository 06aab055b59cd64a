from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from lbpar.calibrate import whole_steps
from lbpar.calibrate.samples import plans_along
from lbpar.calibrate.trust import Trust, WholeSteps
from lbpar.calibrate.whole_steps import fitted, measure_steps, plans, slower, timed_step
from lbpar.config.machine_file import LinkConfig, RateConfig
from lbpar.cost.machine import Machine, find_machine, machine_names
from lbpar.cost.price import price
from lbpar.cost.simulate import simulate
from lbpar.engine.registry import get_engine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.random_plan import random_plan
from lbpar.transport.single import SingleTransport
from lbpar.transport.virtual import VirtualWorld


def small() -> Graph:
    g = GraphBuilder((16, 16, 8))
    x = g.max_pool(g.relu(g.norm(g.conv(g.input, 16, 3, pad=1))), 2)
    return g.build(g.linear(g.flatten(g.add([x, g.relu(x)])), 8)).with_loss(CrossEntropy())


def measured() -> Machine:
    """A machine file with every constant that a measurement fills in."""
    file = find_machine("perlmutter-a100").file
    moves = tuple(
        LinkConfig(kind=kind, ways=2, alpha=1e-5, bandwidth=1e9, beyond=5e8, knee=1e3)
        for kind in ("allreduce", "p2p", "alltoall")
    )
    table = tuple(
        RateConfig(kernel=name, m=64, n=8, k=9, taps=9, rate=1e10)
        for name in ("conv_forward", "max_pool_forward", "norm_relu_forward")
    )
    compute = file.compute.model_copy(
        update={
            "table": table,
            "overhead": 1e-6,
            "starts": {"slice": 2e-6, "conv_forward": 3e-6, "add": 1e-6, "update": 4e-6},
            "speeds": {"rows": 3e9, "columns": 1e9, "update": 2e9, "relu_forward": 1e9},
        }
    )
    levels = tuple(level.model_copy(update={"moves": moves}) for level in file.levels)
    return Machine(file.model_copy(update={"compute": compute, "levels": levels}))


@pytest.mark.parametrize("name", ["measured", *machine_names()])
def test_all_that_a_step_takes_gets_longer_alike(name: str) -> None:
    """With one factor for all, which plan is best stays as it is."""
    machine = measured() if name == "measured" else find_machine(name)
    slow = Machine(slower(machine.file, 2.5, 2.5))
    for seed in range(4):
        program = lower(small(), random_plan(small(), 8, 6, Random(seed)), 8, bucket_bytes=1 << 20)
        before, after = (price(program, m) for m in (machine, slow))
        assert [s.seconds for s in after.steps] == pytest.approx([2.5 * s.seconds for s in before.steps], rel=1e-9)
        longer = simulate(program, after, slow).seconds
        assert longer == pytest.approx(2.5 * simulate(program, before, machine).seconds, rel=1e-9)


def test_the_factor_is_that_of_the_plan_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, graph = find_machine("laptop"), small()
    engine, ranks = get_engine("numpy", "float32", 1), VirtualWorld(Grid((2,))).transport(0)
    times = iter([1.3, 1.0, 1.6, 1.3, 1.3, *[1.2, 1.4] * 20])

    def timed(program: Any, *_: object) -> float:
        return next(times) * simulate(program, price(program, machine), machine).seconds

    monkeypatch.setattr(whole_steps, "timed_step", timed)
    monkeypatch.setattr(whole_steps, "RATIOS", ())
    monkeypatch.setattr(ranks, "bcast", lambda x: x, raising=False)
    found = measure_steps(engine, ranks, graph, 8, machine, "float32", 1e9)
    assert found.factor == pytest.approx(1.3)
    assert found.plans == len(list(plans(graph, 8, 2))) > whole_steps.FEWEST
    assert 0.05 < found.off < 0.15
    times = iter([1.1] * whole_steps.FEWEST)  # no more in no time
    assert measure_steps(engine, ranks, graph, 8, machine, "float32", 0.0) == WholeSteps(
        pytest.approx(1.1), pytest.approx(1.1), whole_steps.FEWEST, pytest.approx(0.0)
    )


def test_moves_of_activations_get_longer_by_a_factor_of_their_own() -> None:
    machine = measured()
    slow = Machine(slower(machine.file, 1.5, 4.0))
    times = Counter[tuple[str, float]]()
    for seed in range(8):
        program = lower(small(), random_plan(small(), 8, 2, Random(seed)), 8, bucket_bytes=1 << 20)
        for before, after in zip(*(price(program, m).steps for m in (machine, slow)), strict=True):
            if before.seconds:
                times[before.kind, round(after.seconds / before.seconds, 6)] += 1
    ratios = {kind: {ratio for k, ratio in times if k == kind} for kind, _ in times}
    assert ratios["compute"] == ratios["allreduce"] == ratios["update"] == {1.5}
    assert ratios["alltoall"] == ratios.get("halo", {4.0}) == {4.0}


@pytest.mark.parametrize(("between", "plans"), [(1.0, 20), (0.5, 20), (1.6, 20), (2.0, 20), (1.6, 7)])
def test_both_factors_are_found(between: float, plans: int) -> None:
    rng = np.random.default_rng(1)
    rest, moved = rng.uniform(1, 3, plans), rng.uniform(0, 2, plans)
    off = np.where(np.arange(plans) % 5 == 0, 1.3, rng.uniform(0.99, 1.01, plans))  # some steps were disturbed
    found = fitted(np.stack([rest, moved, 1.2 * (rest + between * moved) * off], axis=1))
    if plans < whole_steps.ENOUGH:
        assert found.factor == found.between
    else:
        assert found.factor == pytest.approx(1.2, rel=0.03)
        assert found.between == pytest.approx(1.2 * between, rel=0.06)
    assert found.plans == plans


def test_without_moves_of_activations_all_is_alike() -> None:
    found = fitted(np.array([[1.0, 0.0, 1.1 + 0.01 * i] for i in range(11)]))
    assert found.factor == found.between == pytest.approx(1.15)


def test_plans_that_memory_does_not_hold_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_steps, "timed_step", lambda *_: pytest.fail("run"))
    machine = Machine(find_machine("laptop").file.model_copy(update={"memory": 1000}))
    engine = get_engine("numpy", "float32", 1)
    assert measure_steps(engine, SingleTransport(), small(), 8, machine, "float32", 1.0) == WholeSteps()


def test_steps_of_a_network_are_timed() -> None:
    engine, graph = get_engine("numpy", "float32", 1), small()
    programs = [lower(graph, next(plans(graph, batch, 1)), batch) for batch in (1, 64)]
    short, long = (timed_step(p, engine, SingleTransport(), 1.0) for p in programs)
    assert 0 < short < long


def test_plans_are_of_all_kinds_and_the_same_on_all_ranks() -> None:
    graph, grid = small(), Grid.of(4)
    found = list(plans(graph, 8, 4))
    assert found == list(plans(graph, 8, 4))
    along = list(plans_along(graph, 8, 4, grid.axes))
    assert len(along) == 5 and all(plan in found for plan in along)  # N, C, F, H, W
    assert len(found) == len(along) + whole_steps.RANDOM
    assert found[: len(along)] != along


def test_what_was_found_is_said_and_doubted() -> None:
    sure, unsure = (Trust([], 0.0, (), WholeSteps(1.12, 1.3, 9, off)) for off in (0.05, 0.4))
    assert not sure.doubts() and "whole steps" not in Trust([], 0.0).facts()
    assert sure.facts()["whole steps"] == {"factor": 1.12, "between": 1.3, "plans": 9, "off": 0.05}
    assert unsure.doubts() == ["steps of 9 plans lie 40 % from what is predicted (at most 30 %)"]
