"""Problems over fewer configurations, and variables that have no choice left."""

from __future__ import annotations

import numpy as np

from lbpar.solver.cache import Cache
from lbpar.solver.factors import Classes, Factor, Problem
from lbpar.solver.reduce import restrict, settle
from lbpar.solver.run import run


def everyone_beside_one_hub(spokes: int) -> Problem:
    """A variable without a choice beside 70 others, which are a chain."""
    rng = np.random.default_rng(0)
    unary = [np.array([1.0]), *(rng.random(3) for _ in range(spokes))]
    one, each = Classes(np.zeros(1, np.int64), 1), Classes(np.arange(3), 3)
    factors = [Factor((0, v), (one, each), rng.random((1, 3))) for v in range(1, spokes + 1)]
    factors += [Factor((v, v + 1), (each, each), rng.random((3, 3))) for v in range(1, spokes)]
    return Problem(unary, factors)


def test_a_variable_without_a_choice_connects_nothing() -> None:
    """Eliminated last, 70 others would be its neighbours: more than an array has dimensions."""
    problem = everyone_beside_one_hub(70)
    settled = settle(problem)
    assert len(settled.factors) == 69 and all(0 not in f.scope for f in settled.factors)
    rng = np.random.default_rng(1)
    for _ in range(20):
        choice = [0, *rng.integers(0, 3, 70).tolist()]
        assert np.isclose(settled.total(choice), problem.total(choice))
    assert np.isclose(run(settled, Cache(), 10**6).total, problem.total(run(settled, Cache(), 10**6).choice))


def test_factors_between_settled_variables_are_not_lost() -> None:
    one = Classes(np.zeros(1, np.int64), 1)
    problem = Problem([np.array([1.0]), np.array([2.0])], [Factor((0, 1), (one, one), np.array([[4.0]]))])
    assert settle(problem).total([0, 0]) == 7.0 and not settle(problem).factors


def test_a_restricted_problem_costs_the_same() -> None:
    rng = np.random.default_rng(2)
    maps = Classes(np.array([0, 1, 0, 2]), 3), Classes(np.array([1, 1, 0]), 2)
    problem = Problem([rng.random(4), rng.random(3)], [Factor((0, 1), maps, rng.random((3, 2)))])
    kept = [np.array([0, 3]), np.array([0, 1])]
    smaller = restrict(problem, kept, Cache())
    assert smaller.factors[0].table.shape == (2, 1), "classes that nobody has any more are gone"
    for choice in ([0, 0], [0, 1], [1, 0], [1, 1]):
        assert smaller.total(choice) == problem.total([int(k[c]) for k, c in zip(kept, choice, strict=True)])
