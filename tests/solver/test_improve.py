"""Choices that are improved variable by variable, and with most variables free."""

from __future__ import annotations

import numpy as np

from lbpar.solver.improve import descend, improve
from lbpar.solver.search import compile_problem
from tests.util.costs import random_graph


def problem(seed: int):
    return compile_problem(*random_graph(np.random.default_rng(seed), "dense"))[1]


def test_after_a_descent_no_single_change_is_better() -> None:
    for seed in range(20):
        p = problem(seed)
        start = [0] * len(p.unary)
        choice = descend(p, start)
        assert p.total(choice) <= p.total(start) + 1e-9
        assert all(p.costs(v, choice).min() >= p.costs(v, choice)[c] - 1e-9 for v, c in enumerate(choice))


def test_a_descent_stays_within_the_memory() -> None:
    for seed in range(20):
        p, rng = problem(seed), np.random.default_rng(seed)
        memory = [rng.random(u.size) for u in p.unary]
        start = [int(np.argmin(m)) for m in memory]
        limit = sum(m.min() for m in memory) + 0.5
        choice = descend(p, start, memory, limit)
        assert sum(m[c] for m, c in zip(memory, choice, strict=True)) <= limit + 1e-12
        assert p.total(choice) <= p.total(start) + 1e-9


def test_improving_never_makes_worse_and_is_repeatable() -> None:
    for seed in range(20):
        p = problem(seed)
        start = [0] * len(p.unary)
        choice, cells = improve(p, start, -np.inf, lambda order: order.cells <= 200)
        assert p.total(choice) <= p.total(descend(p, start)) + 1e-9
        assert (choice, cells) == improve(p, start, -np.inf, lambda order: order.cells <= 200)
