"""Convolutions whose interior is computed while a halo is under way: the same results, whatever arrives when."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from lbpar.cost.machine import find_machine
from lbpar.cost.price import price
from lbpar.cost.simulate import simulate
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.random_plan import random_plan
from lbpar.program.steps import Compute, Program, Start, Wait
from lbpar.runtime.optim.rules import SGD
from lbpar.selftest.networks import networks
from lbpar.verify.compare import Reference, Update, verify_virtual
from tests.runtime.test_late import late
from tests.util.late import LateEngine
from tests.util.two_steps import CASES, assert_equal, plain

WINDOWS = ("planes", "volumes", "small blocks", "voxels")


@pytest.fixture(autouse=True)
def with_rims(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in (NumpyEngine, LateEngine):
        monkeypatch.setattr(engine, "rims", True)


def parts(program: Program) -> list[str]:
    return [s.kernel.name for s in program.steps if isinstance(s, Compute) and s.kernel.name.endswith("_rims")]


@pytest.mark.parametrize("name", WINDOWS)
def test_random_plans_compute_what_one_rank_does(name: str) -> None:
    """2-D and 3-D, strides, dilation, groups, transposed, odd and empty blocks, kernels longer than blocks."""
    graph = networks()[name]
    update = Update(graph, 5, 1, lambda _: SGD(0.1), 0.1)
    reference, found = Reference(update, NumpyEngine("float64")), set[str]()
    for seed, procs in enumerate((2, 3, 4, 6, 8)):
        plan = random_plan(graph, 5, procs, Random(seed + 11))
        found |= set(parts(update.programs(plan, rims=True)[0]))
        assert verify_virtual(reference, plan).worst < 1e-11
    assert {"conv_forward_rims", "conv_backward_data_rims"} & found


def spatial(size: int = 12) -> Graph:
    g = GraphBuilder(input=(size, size, 4))
    x = g.relu(g.conv(g.input, 8, 3, pad=1, bias=False, name="first"))
    x = g.conv_transpose(g.conv(x, 8, 3, pad=1, stride=2, name="down"), 8, 3, stride=2, pad=1, output_pad=1, name="up")
    return g.build(g.conv(x, 3, 1, name="last")).with_loss(LOSSES["cross_entropy"]())


def split(graph: Graph, procs: int = 2) -> Plan:
    return Plan(Grid((procs,)), {n.name: {"H": (0,)} for n in graph.ops})


def test_the_interior_runs_between_the_start_of_a_halo_and_its_wait() -> None:
    graph = spatial()
    program = lower(graph, split(graph), 2, rims=True)
    at = {}
    for i, s in enumerate(program.steps):
        if isinstance(s, Start | Wait):
            at[type(s).__name__, s.dst] = i
    seen = set()
    for i, s in enumerate(program.steps):
        if isinstance(s, Compute) and s.kernel.name.endswith("_rims"):
            inner = next(
                k
                for k, t in enumerate(program.steps)
                if isinstance(t, Compute) and t.writes == s.writes and t.kernel.name.endswith("_interior")
            )
            assert at["Start", s.reads[0]] < inner < at["Wait", s.reads[0]] < i
            seen.add((s.node, s.kernel.name))
    assert {n for n, _ in seen} >= {"down", "up"}
    assert "conv_forward_rims" in parts(program) and "conv_backward_data_rims" in parts(program)
    assert not parts(lower(graph, split(graph), 2))
    assert not parts(lower(spatial(4), split(spatial(4), 4), 2, rims=True))  # blocks of one row have no interior


@pytest.mark.parametrize("procs", [2, 4])
@pytest.mark.parametrize("case", ["residual", "segmentation", "grouped"])
def test_late_queues_give_the_same_bits(case: str, procs: int) -> None:
    want, training = plain(CASES[case], procs), late(CASES[case], procs)
    for seed in range(8):
        training.world.scheduler.seed(seed)
        assert_equal(training.run(), want)


def test_a_wait_that_is_left_out_is_seen() -> None:
    case: Any = CASES["segmentation"]
    want, training = plain(case, 4), late(case, 4)
    for engine in training.engines:
        engine.broken = {"wait"}
    with pytest.raises((AssertionError, ValueError)):
        assert_equal(training.run(), want)


def test_a_slow_halo_hides_behind_the_interior_in_the_price_of_a_step() -> None:
    machine = find_machine("h100-nvl8")
    g = GraphBuilder(input=(512, 512, 64))
    graph = g.build(g.conv(g.conv(g.input, 64, 3, pad=1), 8, 3, pad=1)).with_loss(LOSSES["cross_entropy"]())
    steps = {}
    for rims in (False, True):
        program = lower(graph, split(graph), 4, rims=rims)
        priced = price(program, machine)
        steps[rims] = simulate(program, priced, machine), sum(s.flops for s in priced.steps)
        share = [s.flops for s in priced.steps if s.what == "conv_forward_interior"]
    assert steps[True][1] == pytest.approx(steps[False][1])
    assert len(share) == 1  # the first layer's halo is fed
    whole = 2 * 4 * 256 * 512 * 8 * 64 * 9
    assert share[0] == pytest.approx(whole * 255 / 256)
    assert steps[True][0].exposed < steps[False][0].exposed
    assert steps[True][0].seconds < steps[False][0].seconds


def test_boxes_of_a_convolution_leave_the_rest_alone() -> None:
    from lbpar.engine.base import LocalWindow

    rng, engine = np.random.default_rng(0), NumpyEngine("float64")
    win = (LocalWindow(3, 2, 1, 1), LocalWindow(2, 1, 2, 1))
    x, w = rng.standard_normal((2, 9, 8, 4)), rng.standard_normal((6, 3, 2, 4))
    y = engine.conv_forward(x, w, None, win, 1, (5, 8))
    got = np.full_like(y, np.nan)
    engine.conv_forward_parts(x, w, None, win, 1, got, [[(1, 3), (2, 8)], [(4, 4), (0, 8)]])
    assert np.isnan(got).sum() == got.size - 2 * 2 * 6 * 6
    np.testing.assert_allclose(got[:, 1:3, 2:8], y[:, 1:3, 2:8], rtol=1e-13)
    dx = engine.conv_backward_data(y, w, win, 1, (9, 8))
    got = np.full_like(dx, np.nan)
    engine.conv_backward_data_parts(y, w, win, 1, got, [[(2, 7), (3, 4)]])
    assert np.isnan(got).sum() == got.size - 2 * 5 * 4
    np.testing.assert_allclose(got[:, 2:7, 3:4], dx[:, 2:7, 3:4], rtol=1e-13)
