"""A group of layers lowered alone, for all candidates, against programs of a network that is little else."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.cost.machine import find_machine
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.layout.grid import Grid
from lbpar.plan.group import Group
from lbpar.plan.pricing import Pricing
from lbpar.program.lowering import wanted_gradients


def lowered(batch: int = 8) -> Group:
    g = GraphBuilder(input=(4, 4, 16))
    x = g.relu(g.conv(g.input, 32, 1, bias=False, name="conv"), name="relu")
    graph = g.build(g.linear(g.global_avg_pool(x), 16)).with_loss(CrossEntropy())
    pricing = Pricing(find_machine("perlmutter-a100"), Grid((2,)))
    of = pricing.moves.cuts.of
    grids = {loop: np.array([of((0,) if loop == one else ()) for one in ("", "N", "F", "C")]) for loop in "NFCHW"}
    return Group(graph, batch, [graph["conv"]], grids, pricing).price(wanted_gradients(graph))


def test_what_moves_follows_from_what_is_split() -> None:
    """Alone: nothing. Samples: the weights' gradient is summed. Filters: nothing. Channels: the output is, where it is read."""
    low = lowered()
    assert (low.summed > 0).tolist() == [False, True, False, False]
    ((axes, full),) = low.messages
    assert axes.tolist() == [0, 1, 0, 0]
    assert full == pytest.approx(np.array([1, 1, 0.5, 0.5]) * 4 * 16 * 32 / (4 << 20))


def test_memory_is_what_waits_for_the_backward_pass_and_the_parameters() -> None:
    """Weights with gradient and momentum; the input is read from outside and kept."""
    weights, x = 4 * 16 * 32, 4 * 8 * 4 * 4 * 16
    low = lowered()
    assert low.memory(set()).tolist() == [x, x / 2, x, x / 2]
    assert low.weights.tolist() == [3 * weights, 3 * weights, 1.5 * weights, 1.5 * weights]
