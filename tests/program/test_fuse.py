"""Fused kernels: where they appear, where they must not, and that they change no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import LOSSES
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Compute, Program
from tests.util.graphs import random_graph
from tests.util.run import assert_same, random_plan, random_state, run, samples

Make = Callable[[GraphBuilder, str], str]


def graph_of(op: Make) -> Graph:
    g = GraphBuilder(input=(6, 5, 4))
    return g.build(op(g, g.input)).with_loss(LOSSES["mse"]())


def kernels(program: Program) -> list[str]:
    return [s.kernel.name for s in program.steps if isinstance(s, Compute)]


def block(g: GraphBuilder, x: str) -> str:
    """Two branches that read the same relu: its gradient is a sum."""
    y = g.relu(g.norm(x))
    return g.relu(g.add([g.norm(g.conv(y, 4, 3, pad=1)), y]))


def dense(g: GraphBuilder, x: str) -> str:
    """New channels from a norm of all channels before, and both."""
    return g.concat([x, g.conv(g.relu(g.norm(x)), 2, 3, pad=1)])


PATTERNS: dict[str, tuple[Make, set[str], set[str]]] = {
    "norm relu": (
        lambda g, x: g.relu(g.norm(g.conv(x, 4, 3))),
        {"norm_relu_forward", "norm_relu_backward_sums"},
        {"norm_apply", "relu_forward", "relu_backward", "norm_backward_sums"},
    ),
    "norm add relu": (
        lambda g, x: g.relu(g.add([g.norm(g.conv(x, 4, 3, pad=1)), x])),
        {"norm_add_relu_forward", "norm_relu_backward_sums"},
        {"norm_apply", "add", "relu_forward", "identity"},
    ),
    "add norm relu": (lambda g, x: g.relu(g.add([x, g.norm(x)])), {"norm_add_relu_forward"}, {"norm_apply", "add"}),
    "two norms": (
        lambda g, x: g.relu(g.add([g.norm(g.conv(x, 4, 1)), g.norm(x)])),
        {"norm_add_relu_forward", "norm_apply", "norm_relu_backward_sums", "norm_backward_sums"},
        {"add", "relu_forward", "relu_backward"},
    ),
    "shortcut around norms": (
        lambda g, x: g.relu(g.norm(g.conv(block(g, g.conv(x, 4, 1)), 3, 1))),
        {"norm_relu_backward_sums", "norm_statistics"},
        {"norm_sums", "norm_moments"},
    ),
    "dense": (
        lambda g, x: dense(g, dense(g, g.conv(x, 4, 1))),
        {"norm_backward_data_add", "norm_statistics", "cut"},
        {"norm_sums", "norm_moments"},
    ),
    "conv relu": (lambda g, x: g.relu(g.conv(x, 4, 3)), {"conv_relu_forward", "relu_backward"}, {"conv_forward"}),
    "conv bias": (
        lambda g, x: g.conv(x, 4, 3),
        {"conv_backward_weights_bias"},
        {"conv_backward_weights", "bias_backward"},
    ),
    "conv without bias": (lambda g, x: g.conv(x, 4, 3, bias=False), {"conv_backward_weights"}, {"bias_backward"}),
}


@pytest.mark.parametrize(("op", "present", "absent"), PATTERNS.values(), ids=PATTERNS.keys())
def test_patterns(op: Make, present: set[str], absent: set[str]) -> None:
    graph = graph_of(op)
    names = set(kernels(lower(graph, Plan(Grid(), {}), 2)))
    assert present <= names and not absent & names
    plain = set(kernels(lower(graph, Plan(Grid(), {}), 2, fused=False)))
    assert not {"norm_relu_forward", "norm_add_relu_forward", "conv_relu_forward", "norm_relu_backward_sums"} & plain


def test_a_value_with_other_readers_is_stored() -> None:
    def op(g: GraphBuilder, x: str) -> str:
        y = g.norm(g.conv(x, 4, 3, pad=1, name="conv"), name="norm")
        return g.add([g.relu(y), g.sigmoid(y)])

    assert {"norm_apply", "relu_forward"} <= set(kernels(lower(graph_of(op), Plan(Grid(), {}), 2)))


MOVED: dict[str, dict[str, Any]] = {
    "summed channels": {"conv": {"C": (0,)}, "relu": {"N": (0,)}},
    "other layout": {"conv": {"N": (0,)}, "relu": {"H": (0,)}},
    "gathered": {"conv": {"F": (0,)}},
}


@pytest.mark.parametrize("ops", MOVED.values(), ids=MOVED.keys())
def test_nothing_is_fused_across_a_move(ops: dict[str, Any]) -> None:
    graph = graph_of(lambda g, x: g.relu(g.conv(x, 4, 3, name="conv"), name="relu"))
    assert "conv_relu_forward" not in kernels(lower(graph, Plan(Grid((2,)), ops), 2))


def test_replicas_of_a_bias_compute_its_gradient_alike() -> None:
    """Ranks that hold different channels run different weight kernels, whose rounding may differ; replicas would drift apart."""
    graph = graph_of(lambda g, x: g.conv(x, 4, 3, name="conv"))
    names = kernels(lower(graph, Plan(Grid((2,)), {"conv": {"C": (0,)}}), 2))
    assert "bias_backward" in names and "conv_backward_weights_bias" not in names


def test_the_networks_output_is_not_fused_away() -> None:
    g = GraphBuilder(input=(6, 5, 4))
    graph = g.build(g.conv(g.input, 4, 3, name="conv")).with_loss(LOSSES["mse"]())
    program = lower(graph, Plan(Grid(), {}), 2)
    assert program.results["output"] == "conv:y"


def test_dropout_of_inference_leaves_no_step() -> None:
    g = GraphBuilder(input=(6,))
    graph = g.build(g.dropout(g.linear(g.input, 4, name="fc"), name="drop"))
    program = lower(graph, Plan(Grid(), {}), 2, training=False)
    assert kernels(program) == ["linear_forward"] and program.results["output"] == "fc:y"


@pytest.mark.parametrize("seed", range(40))
def test_fused_programs_give_the_same(seed: int) -> None:
    rng = np.random.default_rng([7, seed])
    graph = random_graph(rng)
    plan = random_plan(graph, 3, Grid.of(int(rng.choice([1, 2, 3, 4]))), rng, idle=0.4)
    feeds, state = samples(graph, 3, rng), random_state(graph, rng)
    plain = run(graph, plan, 3, feeds, state=state, fused=False, rate=0.1)
    assert_same(run(graph, plan, 3, feeds, state=state, rate=0.1), plain, 1e-11)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("op", [p[0] for p in PATTERNS.values()], ids=PATTERNS.keys())
def test_every_pattern_gives_the_same(op: Make, ranks: int) -> None:
    rng = np.random.default_rng([11, ranks])
    graph = graph_of(op)
    plan = random_plan(graph, 3, Grid.of(ranks), rng, idle=0.3)
    feeds, state = samples(graph, 3, rng), random_state(graph, rng)
    plain = run(graph, plan, 3, feeds, state=state, fused=False)
    assert_same(run(graph, plan, 3, feeds, state=state), plain, 1e-11)
