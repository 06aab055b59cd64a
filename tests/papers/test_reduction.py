"""Folding a graph of layers by node and edge elimination."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.papers.reduction import fold
from lbpar.solver.exact import solve
from lbpar.solver.factors import Problem
from lbpar.solver.search import compile_problem
from tests.util.costs import brute_force, random_graph


def test_folding_a_series_parallel_graph_keeps_the_optimum():
    for seed in range(1, 60, 3):
        nodes, edges = random_graph(np.random.default_rng(seed), "series-parallel")
        names, problem, scratch = compile_problem(nodes, edges)
        remaining, gone = fold(names, list(edges))
        assert sorted([*remaining, *gone]) == sorted(names)
        order = [names.index(n) for n in [*gone, *remaining]]
        assert solve(Problem(problem.unary, problem.factors), order, scratch).total == pytest.approx(
            brute_force(nodes, edges), abs=1e-12
        )


def test_a_diamond_folds_to_its_ends():
    assert fold(list("abcd"), [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])[0] == ["a", "d"]


def test_folding_stops_at_a_node_with_two_consumers_that_never_meet():
    assert fold(list("abcd"), [("a", "b"), ("b", "c"), ("b", "d")]) == (list("abcd"), [])
