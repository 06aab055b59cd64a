"""Terms of the objective, by choice and by variable."""

from __future__ import annotations

import numpy as np

from lbpar.solver.factors import Classes, Factor, Found, Problem


def test_the_costs_of_a_variable_are_the_totals_less_what_it_does_not_change() -> None:
    rng = np.random.default_rng(0)
    maps = Classes(np.array([0, 1, 1]), 2), Classes(np.array([2, 0, 1]), 3)
    factors = [Factor((0, 1), maps, rng.random((2, 3))), Factor((2, 0), (maps[1], maps[0]), rng.random((3, 2)))]
    problem = Problem([rng.random(3) for _ in range(3)], factors)
    assert [len(t) for t in problem.touching] == [2, 1, 1]
    choice = [2, 0, 1]
    for v in range(3):
        totals = [problem.total([*choice[:v], c, *choice[v + 1 :]]) for c in range(3)]
        costs = problem.costs(v, choice)
        np.testing.assert_allclose(costs - costs[0], np.array(totals) - totals[0])


def test_what_was_found_among_some_configurations_is_told_in_the_numbers_of_all() -> None:
    problem = Problem([np.array([5.0, 1.0, 3.0])], [])
    exact = Found([1], 3.0, 3.0, 0, 7).of(problem, [np.array([0, 2])])
    assert exact == Found([2], 3.0, 3.0, 0, 7)
    assert Found([0], 5.0, 2.0, 0, 7).of(problem, [np.array([0, 2])]).bound == 2.0
