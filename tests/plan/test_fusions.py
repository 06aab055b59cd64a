"""Kernels that are fused where nothing moves: which layers they join, and what it saves beside programs lowered both ways."""

from __future__ import annotations

import pytest

from lbpar.cost.machine import find_machine
from lbpar.cost.price import price
from lbpar.graph.builder import GraphBuilder
from lbpar.graph.graph import Graph
from lbpar.graph.ops.losses import CrossEntropy
from lbpar.plan.candidates import planning_grid
from lbpar.plan.fusions import fusions
from lbpar.plan.pricing import Pricing
from lbpar.plan.tables import build_tables, group_nodes
from lbpar.program.lowering import lower
from lbpar.program.plan import Plan

MACHINE = find_machine("perlmutter-a100")


def residual() -> Graph:
    g = GraphBuilder(input=(4, 4, 16))
    x = g.relu(g.norm(g.conv(g.input, 16, 1, bias=False, name="conv"), name="norm"), name="relu")
    x = g.relu(g.add([g.norm(g.conv(x, 16, 1, bias=False, name="conv2"), name="norm2"), x], name="sum"), name="relu2")
    return g.build(g.linear(g.global_avg_pool(x, name="pool"), 16, name="fc")).with_loss(CrossEntropy())


def test_layers_that_fused_kernels_join() -> None:
    graph = residual()
    groups = group_nodes(graph, {})
    found = {joined: sorted(f.kernel.name for f in fs if f.kernel) for joined, fs in fusions(graph, 8, groups).items()}
    assert groups["norm"] == ["norm", "relu"] and groups["sum"] == ["sum", "relu2"]
    assert {"norm_relu_forward", "norm_statistics", "norm_relu_backward_sums"} <= set(found["norm",])
    assert "norm_add_relu_forward" in found["norm2", "sum"]


def test_fusing_saves_what_unfused_kernels_cost_more() -> None:
    """On one process, where nothing moves, all are fused."""
    graph, grid = residual(), planning_grid(1)
    tables = build_tables(graph, 8, Pricing(MACHINE, grid))
    alone, fused = (price(lower(graph, Plan(grid), 8, fused=f), MACHINE).seconds for f in (False, True))
    total = tables.total(dict.fromkeys(tables.nodes, 0))
    assert fused < alone and total == pytest.approx(fused, rel=1e-3)
