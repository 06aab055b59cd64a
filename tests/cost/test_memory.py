"""Memory of a program by liveness."""

from __future__ import annotations

import pytest

from lbpar.cost.memory import LIBRARIES, MESSAGES, SCRATCH, memory
from lbpar.cost.price import local_bytes
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.losses import LOSSES, CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.models.registry import build_model
from lbpar.plan.strategies import strategy_plan
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Free, writes
from tests.cost.nets import even


def test_half_types_halve_the_memory_of_activations() -> None:
    graph = build_model("resnet18", input=(64, 64, 3)).with_loss(CrossEntropy())
    program = lower(graph, Plan(Grid()), 64)
    full, half = (memory(program, dtype, halves=True, workspace=1 << 20) for dtype in ("float32", "bfloat16"))
    assert half.activations == pytest.approx(full.activations / 2, rel=0.1)
    assert (half.weights, half.optimizer) == (full.weights, full.optimizer)
    assert half.peak < full.peak - 0.4 * full.activations
    on_cpus = memory(program, "bfloat16").peak - (half.peak - (1 << 20))
    assert 0 < on_cpus <= SCRATCH


def test_copies_of_volumes_count_on_machines_that_make_them() -> None:
    g = GraphBuilder(input=(16, 24, 24, 8))
    graph = g.build(g.conv(g.input, 4, 3, pad=1)).with_loss(LOSSES["mse"]())
    program = lower(graph, Plan(Grid()), 2)
    made, spared = (memory(program, copies=copies).peak for copies in (True, False))
    volume = 16 * 24 * 24 * 8 * 4
    assert made - spared == volume + 27 * volume // 16
    plane = GraphBuilder(input=(64, 64, 8))
    flat = lower(plane.build(plane.conv(plane.input, 4, 3, pad=1)).with_loss(LOSSES["mse"]()), Plan(Grid()), 2)
    assert memory(flat, copies=True) == memory(flat, copies=False)


def test_memory_follows_the_frees() -> None:
    graph = even()
    program = lower(graph, strategy_plan("data", graph, Grid((2,)), 8), 8)
    got = memory(program, "float32", "adam")
    params = sum(local_bytes(program, p, "float32", False) for p in program.params)
    assert got.weights == params
    alive, most = {f: local_bytes(program, f, "float32", False) for f in program.feeds}, 0
    for step in program.steps:
        if isinstance(step, Free):
            for b in step.buffers:
                alive.pop(b, None)
        else:
            alive |= {b: local_bytes(program, b, "float32", False) for b in writes(step) if b not in program.params}
        most = max(most, sum(alive.values()))
    trained = sum(local_bytes(program, p, "float32", False) for p in graph.params() if "running" not in p)
    assert got.optimizer == 2 * trained
    arrays = got.peak - got.weights - got.optimizer - got.reading - got.overhead
    assert most <= arrays <= most + got.buffers + params
    assert got.largest


def test_spatial_splits_need_less_memory_for_activations() -> None:
    graph = build_model("unet3d", input=(32, 32, 32, 1), width=4).with_loss(CrossEntropy())
    one = memory(lower(graph, Plan(Grid()), 1))
    eight = memory(lower(graph, strategy_plan("spatial", graph, Grid.of(8), 1), 1))
    assert eight.activations + eight.ghosts < 0.35 * (one.activations + one.ghosts)


def test_a_linear_layer_by_hand() -> None:
    """Three samples, 1000 -> 500, Adam, float32, one rank: every number is a product of extents."""
    g = GraphBuilder((1000,))
    graph = g.build(g.linear(g.input, 500, bias=False, name="fc")).with_loss(LOSSES["mse"]())
    got = memory(lower(graph, Plan(Grid()), 3), "float32", "adam", prefetch=2)
    weights, batch = 1000 * 500 * 4, 3 * (1000 + 500) * 4
    assert got.weights == got.gradients == weights
    assert got.optimizer == 2 * weights
    assert got.reading == 3 * batch + 3 * 1000 * 4 // 2
    assert got.ghosts == got.buffers == 0
    assert got.where.endswith("linear_backward_weights")
    assert got.activations == batch + 2 * 3 * 500 * 4 + 8  # the output, its gradient and the loss
    assert got.overhead == LIBRARIES  # nothing is free between so few arrays
    assert got.peak == 4 * weights + got.activations + got.reading + got.overhead


def test_ranks_take_memory_for_messages() -> None:
    graph = even()
    alone = memory(lower(graph, Plan(Grid()), 4)).overhead
    pair = memory(lower(graph, Plan(Grid((2,))), 4)).overhead
    assert pair - alone == MESSAGES
