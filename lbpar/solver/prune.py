"""Configurations that can be dropped without losing the optimum.

``a`` makes ``b`` superfluous when, whatever the neighbours choose, replacing b by a does not raise the objective:

    unary[b] - unary[a] + sum over factors of min over neighbours ( f[b, .] - f[a, .] )  >=  0

(the dead-end elimination rule of side-chain placement, Goldstein 1994). A variable is treated once for every set of tables, so repeated layers share the work.
"""

from __future__ import annotations

import numpy as np

from lbpar.solver.factors import Classes, Factor, Floats, Ints, Problem, Workshop

# Configurations in a row that make no other superfluous, after which a variable is left as it is.
PATIENCE = 24


def keep(unary: Floats, factors: list[Factor], variable: int, workshop: Workshop) -> Ints:
    """Configurations of ``variable`` to keep, in increasing order.

    Configurations with the same class in every factor are merged into the cheapest, then the rule above is applied.
    """
    sides = [(f, f.scope.index(variable)) for f in factors]
    key = ("keep", id(unary), *((id(f.table), axis, id(f.maps[axis])) for f, axis in sides))
    known: Ints | None = workshop.recall(key)
    if known is not None:
        return known
    used = [unary, *(f.table for f in factors), *(f.maps[axis] for f, axis in sides)]
    if not factors:
        return workshop.remember(key, np.array([int(np.argmin(unary))]), *used)
    joint, old = workshop.joint([f.maps[axis] for f, axis in sides])
    cost, first = workshop.cheapest(unary, joint)
    rows = [np.moveaxis(f.table, axis, 0) for f, axis in sides]
    if old is not None:
        rows = [r[o] for r, o in zip(rows, old, strict=True)]
    order = np.argsort(first, kind="stable")
    first, cost = first[order], cost[order]
    rows = [r[order].reshape(len(order), -1) for r in rows]
    return workshop.remember(key, first[_undominated(cost, rows)], *used)


def _undominated(cost: Floats, rows: list[Floats]) -> Ints:
    """Positions that no other position makes superfluous, as far as :data:`PATIENCE` finds them, in increasing order.

    A position that makes another superfluous is no dearer on average over the neighbours, so going through them from the
    cheapest average on meets every pair the right way round.
    """
    with np.errstate(invalid="ignore"):
        average = cost + sum(r.mean(axis=1) for r in rows)
        order = np.argsort(average, kind="stable")
        alive = order
        place = idle = 0
        while place < len(alive) - 1 and idle < PATIENCE:
            a, rest = alive[place], alive[place + 1 :]
            gain = cost[rest] - cost[a]  # the least that replacing b by a saves
            for r in rows:
                difference = r[rest] - r[a]
                # inf - inf: both are forbidden beside that neighbour, which says nothing
                gain += np.where(np.isnan(difference), np.inf, difference).min(axis=1)
            kept = rest[~(gain >= 0)]
            idle = idle + 1 if len(kept) == len(rest) else 0
            alive = np.concatenate([alive[: place + 1], kept])
            place += 1
    return np.sort(alive)


def prune(problem: Problem, workshop: Workshop) -> tuple[Problem, list[Ints]]:
    """The problem over the configurations worth keeping, and for each variable their original numbers."""
    touching: list[list[Factor]] = [[] for _ in problem.unary]
    for f in problem.factors:
        for v in f.scope:
            touching[v].append(f)
    kept = [keep(u, touching[v], v, workshop) for v, u in enumerate(problem.unary)]
    return restrict(problem, kept, workshop), kept


def restrict(problem: Problem, kept: list[Ints], workshop: Workshop) -> Problem:
    """``problem`` over the configurations ``kept`` of each variable; tables lose the classes that none of them has."""
    unary = [_take(u, k, workshop) for u, k in zip(problem.unary, kept, strict=True)]
    factors = []
    for f in problem.factors:
        key = ("restrict", id(f.table), *((id(m), id(kept[v])) for v, m in zip(f.scope, f.maps, strict=True)))
        made = workshop.recall(key)
        if made is None:
            maps: list[Classes] = []
            table = f.table
            for axis, (v, m) in enumerate(zip(f.scope, f.maps, strict=True)):
                old, index = np.unique(m.index[kept[v]], return_inverse=True)
                maps.append(workshop.classes(index.reshape(-1), len(old)))
                table = np.take(table, old, axis=axis)
            made = (tuple(maps), np.ascontiguousarray(table))
            workshop.remember(key, made, f.table, *f.maps, *(kept[v] for v in f.scope))
        factors.append(Factor(f.scope, *made))
    return Problem(unary, factors)


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


def _take(unary: Floats, kept: Ints, workshop: Workshop) -> Floats:
    key = ("take", id(unary), id(kept))
    known: Floats | None = workshop.recall(key)
    return known if known is not None else workshop.remember(key, unary[kept], unary, kept)
