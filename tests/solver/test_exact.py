"""Elimination against brute force, in small chunks and repeated."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.solver import exact as exact_module
from lbpar.solver.search import minimise
from tests.util.costs import CASES, brute_force, random_graph, value


@pytest.mark.parametrize("block", range(7))
def test_equals_brute_force(block):
    for seed, kind in CASES[block::7]:
        nodes, edges = random_graph(np.random.default_rng(seed), kind)
        found = minimise(nodes, edges)
        assert found.exact and found.gap == 0 and found.bound == found.total
        assert found.total == pytest.approx(value(nodes, edges, found.choice), rel=1e-12, abs=1e-12)
        assert found.total == pytest.approx(brute_force(nodes, edges), rel=1e-12, abs=1e-12), (seed, kind)
        assert found.space_size == np.prod([len(u) for u in nodes.values()])
        assert minimise(nodes, edges).choice == found.choice


def test_small_chunks_give_the_same(monkeypatch):
    monkeypatch.setattr(exact_module, "CHUNK_CELLS", 4)
    for seed, kind in CASES[::5]:
        nodes, edges = random_graph(np.random.default_rng(seed), kind)
        assert minimise(nodes, edges).total == pytest.approx(brute_force(nodes, edges), abs=1e-12), (seed, kind)


def test_ties_keep_the_first_configuration():
    nodes = {n: np.zeros(4) for n in "abc"}
    edges = {("a", "b"): np.zeros((4, 4)), ("b", "c"): np.zeros((4, 4))}
    assert minimise(nodes, edges).choice == {"a": 0, "b": 0, "c": 0}


def test_long_repeated_chain_is_evaluated_once():
    rng = np.random.default_rng(1)
    cost, edge = rng.random(30), rng.random((30, 30))
    nodes = {i: cost for i in range(200)}
    edges = {(i, i + 1): edge for i in range(199)}
    found = minimise(nodes, edges)
    state = cost.copy()
    for _ in range(199):
        state = (state[:, None] + edge).min(axis=0) + cost
    assert found.total == pytest.approx(state.min(), rel=1e-12)
    assert found.space_size == 30**200
