"""Cuts of a chain against all ways to cut it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from lbpar.solver.chain import cut_chain


def value(costs: list[float], borders: list[float], starts: tuple[int, ...]) -> float:
    edge = [0.0, *borders[1:], 0.0]
    ends = (*starts[1:], len(costs))
    return max(sum(costs[a:b]) + edge[a] + edge[b] for a, b in zip(starts, ends, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_cuts_are_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, parts = int(rng.integers(1, 9)), int(rng.integers(1, 5))
    costs, borders = rng.integers(0, 9, n).astype(float).tolist(), rng.integers(0, 4, n).astype(float).tolist()
    pinned = [int(rng.integers(parts)) if rng.random() < 0.15 else None for _ in range(n)]
    ways = []
    for inner in combinations(range(1, n), parts - 1):
        starts = (0, *inner)
        part = [sum(i >= s for s in starts) - 1 for i in range(n)]
        if all(p is None or p == q for p, q in zip(pinned, part, strict=True)):
            ways.append((value(costs, borders, starts), starts))
    found = cut_chain(costs, borders, parts, pinned)
    if not ways:
        assert found is None
    else:
        assert found is not None and found[1] == min(ways)[0] == value(costs, borders, tuple(found[0]))
