"""Searches whose tables are too large are bounded from both sides."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.solver import run as run_module
from lbpar.solver.search import minimise
from tests.util.costs import brute_force, random_graph, value


def test_bounds_enclose_the_optimum_when_tables_are_too_large(monkeypatch):
    monkeypatch.setattr(run_module, "CHEAP_CELLS", 0)
    inexact = 0
    for seed in range(2, 120, 3):
        nodes, edges = random_graph(np.random.default_rng(seed), "dense")
        optimum = brute_force(nodes, edges)
        found = minimise(nodes, edges, states_limit=1)
        assert found.bound <= optimum + 1e-9 and found.total >= optimum - 1e-9
        assert found.total == pytest.approx(value(nodes, edges, found.choice))
        assert not found.exact or found.total == pytest.approx(optimum, abs=1e-9)
        inexact += not found.exact
    assert inexact > 3


def test_a_wide_graph_is_bounded_and_says_so():
    rng = np.random.default_rng(5)
    names = range(24)
    nodes = {n: rng.random(8) for n in names}
    edges = {(a, b): rng.random((8, 8)) for a in names for b in names if a < b}
    found = minimise(nodes, edges, states_limit=200_000)
    assert not found.exact
    assert 0 < found.gap < 1
    assert found.bound < found.total
    assert found.total == pytest.approx(value(nodes, edges, found.choice))
    greedy = min(value(nodes, edges, {n: int(rng.integers(8)) for n in names}) for _ in range(200))
    assert found.total < greedy
    assert minimise(nodes, edges, states_limit=200_000).choice == found.choice
