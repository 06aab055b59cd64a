"""PaSE's configurations, costs and optimal totals, against runs of the prototype and hand calculation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from lbpar.errors import ConfigError
from lbpar.graph.builder import GraphBuilder
from lbpar.papers import pase, published
from lbpar.papers.pase_models import from_graph, pase_graph
from lbpar.papers.searches import pase_search


def printed(value: float, like: str) -> str:
    """``value`` with as many digits as ``like``."""
    mantissa, exponent = like.split("e")
    places = len(mantissa.partition(".")[2])
    return f"{value / 10 ** int(exponent):.{places}f}e{exponent}"


@pytest.mark.parametrize("procs", sorted(published.PASE_COUNTS))
def test_alexnet_configurations_per_vertex(procs):
    tables = pase.build_tables(pase_graph("pase-alexnet", 128), procs)
    assert tuple(map(len, tables.configurations.values())) == published.PASE_COUNTS[procs]


@pytest.mark.parametrize(("model", "procs"), sorted(published.PASE_TOTALS))
def test_optimal_totals_to_all_printed_digits(model, procs):
    expected = published.PASE_TOTALS[model, procs]
    tables, found = pase_search(model, 128, procs)
    assert found.exact
    assert printed(found.total, expected) == expected
    assert tables.total(found.choice) == pytest.approx(found.total, rel=1e-14)


@pytest.mark.parametrize("procs", [4, 16, 32])
def test_alexnet_strategies(procs):
    tables, found = pase_search("pase-alexnet", 128, procs)
    best = {n: tuple(map(int, tables.configurations[n][c])) for n, c in found.choice.items()}
    assert tuple(best[n] for n in ("fc6", "fc7", "fc8")) == published.PASE_FC[procs]
    alone = (procs, 1, 1, 1, 1, 1, 1)
    late = (16, 2, 1, 1, 1, 1, 1) if procs == 32 else alone  # (b, c, h, w, r, s, n)
    assert [best[f"conv{i}"] for i in range(1, 6)] == [alone, alone, alone, late, late]


@pytest.mark.parametrize("procs", [4, 16, 32])
def test_data_parallel_and_one_weird_trick(procs):
    tables = pase.build_tables(pase_graph("pase-alexnet", 128), procs)

    def total(**other):
        rows = {n: (procs, *(1,) * (r.shape[1] - 1)) for n, r in tables.configurations.items()} | other
        return tables.total({n: tables.row(n, row) for n, row in rows.items()})

    assert printed(total(), published.PASE_DATA_PARALLEL[procs]) == published.PASE_DATA_PARALLEL[procs]
    trick = {n: (1, procs, 1) for n in ("fc6", "fc7", "fc8")}
    ours = total(**trick, softmax=(1, procs))
    assert printed(ours, published.PASE_ONE_WEIRD_TRICK[procs]) == published.PASE_ONE_WEIRD_TRICK[procs]


def test_configurations_equal_a_plain_enumeration():
    for extents, procs in (((128, 3, 55, 11), 16), ((12, 9, 1), 7), ((4, 4, 4), 64), ((7,), 8)):
        allowed = [[d for d in range(1, n + 1) if n % d == 0 and n / d >= 4] or [1] for n in extents]
        plain = [c for c in itertools.product(*allowed) if math.prod(c) <= procs]
        assert [tuple(c) for c in pase.configurations(extents, procs).tolist()] == plain


def test_edge_cost_by_hand():
    # A (16, 8) tensor held in blocks of (4, 8), wanted in (16, 2): 32 words of which 4 * 2 are there.
    cost = pase.edge_costs((16, 8), np.array([[4, 1]]), np.array([[1, 4], [8, 1], [4, 1]]), pase.Machine())
    assert cost.tolist() == [[5000 * 2 * (32 - 8), 5000 * 2 * 16, 0.0]]


def test_linear_and_convolution_costs_by_hand():
    machine = pase.Machine()
    g = GraphBuilder((10, 10, 4))
    x = g.relu(g.conv(g.input, 16, 3, pad=1, name="conv"))
    graph = from_graph(g.build(g.linear(g.global_avg_pool(x), 8, name="fc")), 8)
    vertex = graph.layers["conv"]
    (cost,) = pase.node_costs(vertex, np.array([[2, 2, 1, 1, 1, 1, 4]]), machine)
    m, n, k = 4 * 100, 4, 2 * 9
    reductions = m * n / 2 * 2 * 1 + m * k / 4 * 2 * 3 + n * k / 2 * 2 * 1
    assert cost == 3 * m * n * k + 3 * m * n + 5000 * reductions
    (cost,) = pase.node_costs(graph.layers["fc"], np.array([[2, 1, 4]]), machine)
    assert cost == 3 * 4 * 8 * 4 + 5000 * (4 * 8 / 4 * 2 * 3 + 8 * 4 / 2 * 2 * 1)


def test_pooling_halo_norm_and_softmax_by_hand():
    machine = pase.Machine(tflops=1, gbps=8)
    g = GraphBuilder((16, 16, 2))
    x = g.norm(g.max_pool(g.input, 3, 1, 1, name="pool"), name="norm")
    graph = from_graph(g.build(g.linear(g.flatten(x), 12)), 4)
    (cost,) = pase.node_costs(graph.layers["pool"], np.array([[2, 1, 4, 1]]), machine)
    assert cost == 2 * 2 * 4 * 16 + 1000 * 2 * 2 * ((4 + 3) * 16 - 4 * 16)
    (cost,) = pase.node_costs(graph.layers["norm"], np.array([[2, 2, 1, 1]]), machine)
    elements = 2 * 1 * 256
    assert cost == 16 * elements + 4 * 1000 * (elements / 2 / 2 * 2) + 4 * 1000 * (2 / 2 * 2)
    costs = pase.node_costs(graph.layers["softmax"], np.array([[2, 1], [1, 3]]), machine)
    assert costs.tolist() == [4 * 2 * 12 + 4, 4 * 4 * 4 + 8 + 1000 * 2 * 4]


def test_other_batches_processes_and_machines():
    for batch, procs in ((128, 12), (96, 1), (1, 8), (100, 7)):
        tables, found = pase_search("pase-alexnet", batch, procs)
        assert found.exact and all((r.prod(axis=1) <= procs).all() for r in tables.configurations.values())
    one, _ = pase_search("pase-alexnet", 64, 1)
    assert all(len(r) == 1 for r in one.configurations.values())


def test_bad_arguments_are_named():
    with pytest.raises(ConfigError, match="pase-alexnet, pase-inception-v3, pase-resnet101"):
        pase_graph("pase-vgg", 128)
    with pytest.raises(ConfigError, match="batch 0"):
        pase_graph("pase-alexnet", 0)
    with pytest.raises(ConfigError, match="0 processes"):
        pase.build_tables(pase_graph("pase-alexnet", 8), 0)
    with pytest.raises(ConfigError, match="0 GB/s"):
        pase.Machine(gbps=0)


def test_networks_have_the_prototypes_vertices():
    assert {name: len(pase_graph(name, 8).layers) for name in ("pase-alexnet", "pase-inception-v3")} == {
        "pase-alexnet": 14,
        "pase-inception-v3": 218 + 1,  # and the loss
    }
