"""The best choice within a memory limit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from lbpar.errors import PlanError
from lbpar.solver.search import minimise
from tests.util.costs import brute_force, random_graph


@pytest.mark.parametrize("kind", ["tree", "series-parallel", "dense"])
def test_memory_limit_is_exact(kind):
    for seed in range(40):
        rng = np.random.default_rng(1000 + seed)
        nodes, edges = random_graph(rng, kind)
        memory = {n: rng.integers(0, 9, len(u)).astype(float) for n, u in nodes.items()}
        least = sum(m.min() for m in memory.values())
        most = sum(m.max() for m in memory.values())
        limit = float(np.floor(least + rng.random() * (most - least)))
        found = minimise(nodes, edges, memory=memory, limit=limit)
        assert found.exact, (seed, kind)
        assert found.memory == sum(memory[n][c] for n, c in found.choice.items()) <= limit
        assert found.total == pytest.approx(brute_force(nodes, edges, memory, limit), abs=1e-9), (seed, kind)


def test_memory_limit_within_a_gap():
    rng = np.random.default_rng(11)
    nodes = {n: rng.random(9) for n in range(12)}
    edges = {(n, n + 1): rng.random((9, 9)) for n in range(11)}
    memory = {n: rng.random(9) for n in nodes}
    limit = 0.3 * sum(m.max() for m in memory.values())
    exact = minimise(nodes, edges, memory=memory, limit=limit)
    rough = minimise(nodes, edges, memory=memory, limit=limit, gap=0.2)
    assert rough.bound <= exact.total + 1e-9 <= rough.total + 2e-9
    assert rough.gap <= 0.2 and rough.memory <= limit and rough.states <= exact.states


def test_memory_limit_that_nothing_fits_names_the_smallest_footprint():
    nodes = {"conv": [0.0, 1.0], "fc": [0.0]}
    with pytest.raises(PlanError, match=r"smallest footprint is 12, of which 'conv' needs 8"):
        minimise(nodes, {}, memory={"conv": [9.0, 8.0], "fc": [4.0]}, limit=11)


@pytest.mark.parametrize("seed", range(8))
def test_the_cheapest_choice_that_fits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = {n: rng.random(4) for n in "abcd"}
    memory = {n: rng.integers(1, 9, 4).astype(float) for n in nodes}
    edges = {("a", "b"): rng.random((4, 4)), ("b", "c"): rng.random((4, 4)), ("a", "d"): rng.random((4, 4))}
    totals = {}
    for choice in product(range(4), repeat=4):
        c = dict(zip("abcd", choice, strict=True))
        total = sum(nodes[n][c[n]] for n in nodes) + sum(t[c[u], c[v]] for (u, v), t in edges.items())
        totals[choice] = (total, sum(memory[n][c[n]] for n in nodes))
    limit = float(np.median([m for _, m in totals.values()]))
    best = min(t for t, m in totals.values() if m <= limit)
    found = minimise(nodes, edges, memory=memory, limit=limit)
    assert found.total == pytest.approx(best) and found.exact
    assert found.memory is not None and found.memory <= limit
    with pytest.raises(PlanError, match="smallest footprint"):
        minimise(nodes, edges, memory=memory, limit=0.5)
