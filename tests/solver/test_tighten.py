"""Dropping configurations that cannot be optimal."""

from __future__ import annotations

import numpy as np
import pytest

from lbpar.solver import run as run_module
from lbpar.solver.search import compile_problem, minimise
from lbpar.solver.tighten import narrow
from tests.util.costs import CASES, brute_force, random_graph


@pytest.mark.parametrize("block", range(3))
def test_narrowing_keeps_the_optimum(monkeypatch, block):
    monkeypatch.setattr(run_module, "CHEAP_CELLS", 0)  # every search is narrowed, and narrowed to the end
    for seed, kind in CASES[block::3]:
        nodes, edges = random_graph(np.random.default_rng(seed), kind)
        if seed % 7 == 0:  # forbid a few
            for cost in nodes.values():
                cost[1::2] = np.inf
        optimum = brute_force(nodes, edges)
        found = minimise(nodes, edges)
        assert found.exact and found.total == pytest.approx(optimum, rel=1e-12, abs=1e-12), (seed, kind)
        _, problem, _ = compile_problem(nodes, edges)
        narrowed = narrow(problem, lambda p: False, 10_000)
        assert narrowed.best.bound <= optimum + 1e-9 <= narrowed.best.total + 2e-9
        left = {n: u[k] for (n, u), k in zip(nodes.items(), narrowed.kept, strict=True)}
        where = dict(zip(nodes, narrowed.kept, strict=True))
        rest = {(a, b): e[np.ix_(where[a], where[b])] for (a, b), e in edges.items()}
        assert brute_force(left, rest) == pytest.approx(optimum, rel=1e-12, abs=1e-12), (seed, kind)


def test_narrowing_is_exact_on_a_chain_and_strong_on_a_grid():
    rng = np.random.default_rng(2)
    nodes = {i: rng.random(40) for i in range(30)}
    chain = {(i, i + 1): rng.random((40, 40)) for i in range(29)}
    _, problem, _ = compile_problem(nodes, chain)
    narrowed = narrow(problem, lambda p: False, 10**6)
    best = minimise(nodes, chain).total
    assert narrowed.best.bound == pytest.approx(best) and narrowed.best.total == pytest.approx(best)
    assert sum(map(len, narrowed.kept)) <= 60
    skips = chain | {(i, i + 4): 0.2 * rng.random((40, 40)) for i in range(26)}
    _, problem, _ = compile_problem(nodes, skips)
    narrowed = narrow(problem, lambda p: False, 10**6)
    assert narrowed.best.bound > 0.9 * narrowed.best.total
