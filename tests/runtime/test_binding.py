"""Kernels bound to one rank's blocks."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from lbpar.engine.base import Engine
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.rules import Rules
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan
from lbpar.program.steps import Compute
from lbpar.runtime.binding import BINDERS, Bound, MicroBatch, bind, register_kernel


def bound(graph: Graph, kernel: str, loops: dict[str, tuple[int, ...]], ranks: int, batch: int = 4) -> list[Bound]:
    """A kernel of node ``n`` on every rank of a line."""
    program = lower(graph, Plan(Grid((ranks,)), {"n": loops}), batch)
    (step,) = (s for s in program.steps if isinstance(s, Compute) and s.node == "n" and s.kernel.name == kernel)
    return [Bound.of(step, program, rank) for rank in range(ranks)]


def linear(features: int = 6) -> Graph:
    g = GraphBuilder((8,))
    return g.build(g.linear(g.input, features, name="n")).with_loss(CrossEntropy())


def test_every_kernel_of_the_engine_has_a_binder() -> None:
    """But for arrays and update rules, and for what binders call under another name."""
    kernels = Engine.__abstractmethods__ - Rules.__abstractmethods__
    shared = {
        "activation_forward",
        "activation_backward",
        "error_loss",
        "error_backward",
    }  # by kind: elu_forward, l1_loss
    assert kernels - set(BINDERS) == {"bias_add", *shared}


def test_one_rank_of_those_whose_sums_meet_adds_the_bias() -> None:
    x, w, bias = np.ones((4, 4)), np.ones((6, 4)), np.full(6, 100.0)
    first, second = bound(linear(), "linear_forward", {"C": (0,)}, 2)
    engine, micro_batch = NumpyEngine(np.float64), MicroBatch()
    assert first.biased and not second.biased
    np.testing.assert_array_equal(bind(first)(engine, micro_batch, x, w, bias)[0], np.full((4, 6), 104.0))
    np.testing.assert_array_equal(bind(second)(engine, micro_batch, x, w, bias)[0], np.full((4, 6), 4.0))


def test_windows_are_shifted_to_where_blocks_begin() -> None:
    g = GraphBuilder((8, 8, 2))
    graph = g.build(g.global_avg_pool(g.conv(g.input, 2, 3, stride=2, pad=1, name="n"))).with_loss(CrossEntropy())
    first, second = bound(graph, "conv_forward", {"H": (0,)}, 2)
    assert [dim.pad for dim in first.windows(first.reads[0], first.writes[0])] == [1, 1]
    # Outputs 2 and 3 of the second rank read rows 3 to 7, of which it has no other: nothing lies before its block.
    assert [dim.pad for dim in second.windows(second.reads[0], second.writes[0])] == [0, 1]


def test_a_kernel_without_output_is_not_called() -> None:
    blocks = bound(linear(features=2), "linear_forward", {"F": (0,)}, 3)
    with patch.dict(BINDERS, linear_forward=lambda b: pytest.fail("bound")):
        (y,) = bind(blocks[2])(NumpyEngine(np.float32), MicroBatch())
    assert y.shape == (4, 0) and y.dtype == np.float32


def test_a_registered_function_gets_the_attributes_that_it_names() -> None:
    g = GraphBuilder((8,))
    graph = g.build(g.leaky_relu(g.input, 0.25, name="n")).with_loss(CrossEntropy())
    with patch.dict(BINDERS):
        register_kernel("leaky_relu_forward", lambda x, slope: x + slope, "slope")
        (block,) = bound(graph, "leaky_relu_forward", {}, 1)
        (y,) = bind(block)(NumpyEngine(np.float64), MicroBatch(), np.zeros((4, 8)))
    np.testing.assert_array_equal(y, np.full((4, 8), 0.25))
