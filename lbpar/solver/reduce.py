"""Smaller problems: over fewer configurations, and without the variables that have no choice left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lbpar.solver.cache import Cache
from lbpar.solver.factors import Factor, Ints, Problem


def restrict(problem: Problem, kept: Sequence[Ints], cache: Cache) -> Problem:
    """``problem`` over the configurations ``kept`` of each variable; tables lose the classes that none of them has."""
    factors = []
    for f in problem.factors:
        old, maps = [], []
        for v, m in zip(f.scope, f.maps, strict=True):
            classes, index = m.among(kept[v])
            old.append(classes)
            maps.append(cache.classes(index, len(classes)))
        factors.append(Factor(f.scope, tuple(maps), cache.intern(f.table[np.ix_(*old)])))
    return Problem([cache.intern(u[k]) for u, k in zip(problem.unary, kept, strict=True)], factors)


def settle(problem: Problem) -> Problem:
    """The same with the terms of variables that have no choice left added to those of the others, so that they connect nothing."""
    fixed = [u.size == 1 for u in problem.unary]
    unary, factors = list(problem.unary), []
    for f in problem.factors:
        left = [(v, m) for v, m in zip(f.scope, f.maps, strict=True) if not fixed[v]]
        at = tuple(int(m.index[0]) if fixed[v] else slice(None) for v, m in zip(f.scope, f.maps, strict=True))
        if len(left) == len(f.scope):
            factors.append(f)
        elif len(left) > 1:
            factors.append(Factor(tuple(v for v, _ in left), tuple(m for _, m in left), f.table[at]))
        else:
            v, costs = (left[0][0], f.table[at][left[0][1].index]) if left else (f.scope[0], f.table[at])
            unary[v] = unary[v] + costs
    return Problem(unary, factors)
