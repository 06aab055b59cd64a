"""Exact minimisation: the variables are eliminated one after the other in the (min, +) algebra, then recalled backwards.

Eliminating a variable costs (classes x classes x configurations), not the cube of the number of configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbpar.solver.cache import Cache
from lbpar.solver.factors import Factor, Floats, Found, Ints, Problem
from lbpar.solver.order import Order, plan_order
from lbpar.solver.reduce import restrict, settle

# Cells worked on at a time: 16 MiB of float64 stays near the last-level cache and bounds the memory of any table.
CHUNK_CELLS = 1 << 21
# Cells of one elimination in `project`.
MOST_CELLS = 1 << 25


class TooLarge(Exception):
    """An elimination has more than `MOST_CELLS` cells."""


@dataclass(frozen=True, eq=False)
class Eliminated:
    """What eliminating a variable left behind.

    ``least``: the cost over its neighbours; ``best``, of the same shape: the configuration of the eliminated variable that
    attains it; ``cells``: table cells evaluated.
    """

    least: Factor
    best: NDArray[np.signedinteger[Any]]
    cells: int


def solve(problem: Problem, sequence: Sequence[int], cache: Cache) -> Found:
    """Minimise ``problem`` exactly, eliminating its variables in ``sequence``.

    Exact for any order; the order decides only how large the tables get. ``cells`` counts what was really evaluated:
    an elimination that repeats an earlier one counts nothing.
    """
    unary = list(problem.unary)
    touching: list[dict[Factor, None]] = [dict.fromkeys(factors) for factors in problem.touching]
    done: list[tuple[int, Eliminated]] = []
    for v in sequence:
        left = eliminate(v, unary[v], list(touching[v]), cache)
        for f in touching[v]:
            for u in f.scope:
                if u != v:
                    del touching[u][f]
        done.append((v, left))
        neighbours = left.least.scope
        if len(neighbours) == 1:
            unary[neighbours[0]] = cache.add(unary[neighbours[0]], left.least.table, left.least.maps[0])
        else:
            for u in neighbours:
                touching[u][left.least] = None
    choice = [0] * len(unary)
    for v, left in reversed(done):
        choice[v] = int(left.best[left.least.place(choice)])
    total = problem.total(choice)
    width = max((len(left.least.scope) for _, left in done), default=0)
    return Found(choice, total, total, width, sum(left.cells for _, left in done))


def project(problem: Problem, kept: Sequence[int], cache: Cache) -> Floats:
    """The least cost for every choice of the variables ``kept``, one dimension for each; raises `TooLarge` where a table would not fit."""
    unary = list(problem.unary)
    touching: list[dict[Factor, None]] = [dict.fromkeys(factors) for factors in problem.touching]
    total = np.zeros(tuple(unary[v].size for v in kept))
    for v in plan_order(problem).sequence:
        if v in kept:
            continue
        near = {u for f in touching[v] for u in f.scope} | {v}
        if prod(max([1, *(f.map(u).count for f in touching[v] if u in f.scope)]) for u in near) > MOST_CELLS:
            raise TooLarge
        left = eliminate(v, unary[v], list(touching[v]), cache).least
        for f in touching[v]:
            for u in f.scope:
                if u != v:
                    del touching[u][f]
        if not left.scope:
            total = total + left.table
        elif len(left.scope) == 1:
            unary[left.scope[0]] = cache.add(unary[left.scope[0]], left.table, left.maps[0])
        else:
            for u in left.scope:
                touching[u][left] = None
    for i, v in enumerate(kept):
        total = total + unary[v].reshape((1,) * i + (-1,) + (1,) * (len(kept) - i - 1))
    for f in dict.fromkeys(f for v in kept for f in touching[v]):
        full = f.table[np.ix_(*(m.index for m in f.maps))]
        order = [f.scope.index(v) for v in kept if v in f.scope]
        total = total + np.expand_dims(full.transpose(order), tuple(i for i, v in enumerate(kept) if v not in f.scope))
    return total


def solve_within(problem: Problem, kept: Sequence[Ints], fits: Callable[[Order], bool]) -> Found | None:
    """The best choice among ``kept`` configurations of each variable, None where even that needs tables that do not fit."""
    cache = Cache()
    small = settle(restrict(problem, kept, cache))
    order = plan_order(small)
    return solve(small, order.sequence, cache).of(problem, kept) if fits(order) else None


def eliminate(variable: int, unary: Floats, factors: Sequence[Factor], cache: Cache) -> Eliminated:
    """Minimise ``unary[c] + sum of factors`` over the configurations c of ``variable``, for all neighbours'.

    Ties go to the configuration that comes first among the cheapest of its class, classes in order.
    """
    neighbours = tuple(dict.fromkeys(u for f in factors for u in f.scope if u != variable))
    axes = (*neighbours, variable)
    key = (id(unary), *((id(f.table), *((axes.index(u), id(f.map(u))) for u in f.scope)) for f in factors))
    if key in cache.results:
        known = cache.results[key][0]
        return replace(known, least=replace(known.least, scope=neighbours), cells=0)
    out = _eliminate(axes, unary, factors, cache)
    cache.results[key] = out, (unary, factors)
    return out


def _eliminate(axes: tuple[int, ...], unary: Floats, factors: Sequence[Factor], cache: Cache) -> Eliminated:
    """`eliminate` the last of ``axes``, the variables that occur."""
    joints, tables = [], [f.table for f in factors]
    for u in axes:
        touching = [i for i, f in enumerate(factors) if u in f.scope]
        maps = [factors[i].map(u) for i in touching]
        joint, old = cache.joint(*maps) if maps else (cache.classes(np.zeros(unary.size, np.int64), 1), ())
        joints.append(joint)
        for i, classes in zip(touching, old, strict=False):
            tables[i] = tables[i].take(classes, axis=factors[i].scope.index(u))
    cost, configurations = cache.cheapest(unary, joints[-1])
    parts = [cost.reshape((1,) * (len(axes) - 1) + (-1,))]
    for f, table in zip(factors, tables, strict=True):
        order = sorted(range(len(f.scope)), key=lambda j: axes.index(f.scope[j]))
        parts.append(np.expand_dims(table.transpose(order), tuple(i for i, u in enumerate(axes) if u not in f.scope)))
    shape = tuple(j.count for j in joints)
    small = np.int16 if unary.size < 2**15 else np.int32
    value, best = np.empty(shape[:-1]), np.empty(shape[:-1], small)
    _contract(sorted(parts, key=lambda p: p.size), shape, configurations.astype(small), value, best)
    return Eliminated(Factor(axes[:-1], tuple(joints[:-1]), value), best, prod(shape))


def _contract(
    parts: list[Floats], shape: tuple[int, ...], names: NDArray[Any], value: Floats, best: NDArray[Any]
) -> None:
    """``value = min over the last axis of sum(parts)`` and ``best = names[argmin]``, in bounded chunks."""
    step = max(1, CHUNK_CELLS // prod(shape[1:]))
    if len(shape) == 1 or shape[0] <= step:
        total = np.broadcast_to(reduce(np.add, parts), shape)
        where = total.argmin(axis=-1)
        value[...] = np.take_along_axis(total, np.expand_dims(where, -1), -1)[..., 0]
        best[...] = names[where]
        return
    single = step == 1 and len(shape) > 2
    for at in range(0, shape[0], step):
        rows = at if single else slice(at, at + step)
        cut = [p if len(p) == 1 and not single else p[0] if len(p) == 1 else p[rows] for p in parts]
        inner = shape[1:] if single else (min(step, shape[0] - at), *shape[1:])
        _contract(cut, inner, names, value[rows], best[rows])
