"""Small random problems of node and edge costs, and their optimum by brute force."""

from __future__ import annotations

import itertools

import numpy as np


def random_graph(rng, kind):
    """Node costs and edge costs of a small random graph; about one in three matrices has few distinct rows."""
    n = int(rng.integers(2, 8))
    ks = rng.integers(1, 5, n)
    pairs = set()
    if kind == "tree":
        pairs = {(int(rng.integers(0, v)), v) for v in range(1, n)}
    elif kind == "series-parallel":
        pairs = {(0, 1)}
        for v in range(2, n):
            a, b = sorted(pairs)[int(rng.integers(len(pairs)))]
            pairs |= {(a, v), (v, b)}
            if rng.random() < 0.5:
                pairs.discard((a, b))
    else:
        pairs = {(a, b) for a in range(n) for b in range(n) if a != b and rng.random() < 0.5}
    integral = rng.random() < 0.5  # integers make ties
    draw = (lambda *s: rng.integers(0, 6, s).astype(float)) if integral else (lambda *s: rng.normal(size=s))
    nodes = {f"n{i}": draw(k) for i, k in enumerate(ks)}
    edges = {}
    for a, b in sorted(pairs):
        m = draw(ks[a], ks[b])
        if rng.random() < 0.3:
            m = m[rng.integers(0, ks[a], ks[a])]
        edges[f"n{a}", f"n{b}"] = m
    return nodes, edges


def value(nodes, edges, choice):
    return sum(u[choice[n]] for n, u in nodes.items()) + sum(e[choice[a], choice[b]] for (a, b), e in edges.items())


def brute_force(nodes, edges, memory=None, limit=np.inf):
    best = np.inf
    for c in itertools.product(*(range(len(u)) for u in nodes.values())):
        choice = dict(zip(nodes, c, strict=True))
        if memory is not None and sum(memory[n][i] for n, i in choice.items()) > limit:
            continue
        best = min(best, value(nodes, edges, choice))
    return best


CASES = [(seed, ("tree", "series-parallel", "dense")[seed % 3]) for seed in range(210)]
