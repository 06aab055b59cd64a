"""The best choice within a memory limit against brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from lbpar.errors import PlanError
from lbpar.solver.search import minimise


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
