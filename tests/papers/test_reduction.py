"""Folding a graph of layers by node and edge elimination."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.papers.reduction import eliminate_to_k
from tests.util.costs import brute_force, random_graph


def test_folding_a_series_parallel_graph_leaves_two_nodes_and_the_optimum():
    for seed in range(1, 60, 3):
        nodes, edges = random_graph(np.random.default_rng(seed), "series-parallel")
        edges = {(a, b): e for (a, b), e in edges.items()}
        folded = eliminate_to_k(nodes, edges)
        assert folded.total == pytest.approx(brute_force(nodes, edges), abs=1e-12)
        assert folded.k == len(folded.remaining) == len(nodes) - len(folded.eliminated)
    diamond = {("a", "b"): np.zeros((2, 2)), ("a", "c"): np.zeros((2, 2)), ("b", "d"): np.zeros((2, 2))}
    diamond["c", "d"] = np.zeros((2, 2))
    folded = eliminate_to_k({n: np.zeros(2) for n in "abcd"}, diamond)
    assert folded.remaining == ("a", "d") and folded.combinations == 4


def test_folding_stops_at_a_node_with_two_consumers_that_never_meet():
    edges = {(a, b): np.zeros((2, 2)) for a, b in ["ab", "bc", "bd"]}
    assert eliminate_to_k({n: np.zeros(2) for n in "abcd"}, edges).remaining == ("a", "b", "c", "d")
