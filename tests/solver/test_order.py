"""Elimination orders and what they cost, against the tables that are really made."""

from __future__ import annotations

import numpy as np

from lbpar.solver.exact import solve
from lbpar.solver.order import best_order, plan_order
from lbpar.solver.search import compile_problem
from tests.util.costs import CASES, random_graph


def test_what_an_order_is_said_to_cost_is_never_exceeded() -> None:
    for seed, kind in CASES[::6]:
        _, problem, cache = compile_problem(*random_graph(np.random.default_rng(seed), kind))
        orders = [plan_order(problem, rule) for rule in ("size", "degree")]
        for order in orders:
            assert sorted(order.sequence) == list(range(len(problem.unary)))
            found = solve(problem, order.sequence, type(cache)())
            assert found.cells <= order.cells and found.width <= order.width
        assert best_order(problem, 0).cells == min(o.cells for o in orders)


def test_a_chain_is_eliminated_without_ever_meeting_two_neighbours_from_its_ends() -> None:
    nodes = {n: np.zeros(5) for n in range(6)}
    rng = np.random.default_rng(0)
    _, problem, _ = compile_problem(nodes, {(n, n + 1): rng.random((5, 5)) for n in range(5)})
    order = plan_order(problem)
    assert order.width == 1 and order.cells == 5 * 25 + 1 * 5
