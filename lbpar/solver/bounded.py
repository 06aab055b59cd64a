"""Bounds from both sides for graphs that are too wide for exact elimination.

Lower bound: mini-buckets (Dechter and Rish 2003). Where the table of a variable would be too large, the factors that
touch it are dealt into groups whose tables fit, each group is minimised on its own, and cost is first shifted
between the groups so that they agree on the variable as far as they can (max-marginal matching).

Upper bound: the choice that the mini-buckets suggest, improved by fixing some variables at their present values and
minimising over all the others exactly, for many different cuts. The gap between the two is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lbpar.solver.exact import solve
from lbpar.solver.factors import Eliminated, Factor, Floats, Problem, Workshop, row
from lbpar.solver.order import Order, best_order

ROUNDS = 24  # cuts tried
PATIENCE = 8  # cuts in a row without gain after which the improvement stops


@dataclass(frozen=True)
class Rough:
    """A choice, its objective, a proven lower bound, the width and the cells of the tables used."""

    choice: list[int]
    total: float
    bound: float
    width: int
    cells: int


def bounded(
    problem: Problem,
    order: Order,
    fits: Callable[[Order], bool],
    states_limit: int,
    seed: int,
) -> Rough:
    """Bound the minimum of ``problem`` from both sides; deterministic for a given ``seed``."""
    bound, choice, width, cells = mini_buckets(problem, order, max(4096, states_limit // 64))
    choice = settle(problem, choice)
    total = problem.total(choice)
    rng = np.random.default_rng(seed)
    idle = 0
    for turn in range(ROUNDS):
        if idle >= PATIENCE or total <= bound:
            break
        free = cut(problem, fits, rng, turn)
        better, used = improve(problem, choice, free)
        cells += used
        value = problem.total(better)
        if value + 1e-12 * abs(value) < total:
            choice, total, idle = better, value, 0
        else:
            idle += 1
    return Rough(choice, total, bound, width, cells)


def mini_buckets(problem: Problem, order: Order, table_cells: int) -> tuple[float, list[int], int, int]:
    """Lower bound, the choice suggested by the buckets, width and cells, with tables of at most ``table_cells``."""
    workshop = Workshop()
    table_cells = min(table_cells, 1 << 24)
    n = len(problem.unary)
    touching: list[list[Factor]] = [[] for _ in range(n)]
    for f in problem.factors:
        for v in f.scope:
            touching[v].append(f)
    buckets: dict[int, list[Factor]] = {}
    constant = 0.0
    width = cells = 0
    unary = list(problem.unary)
    for v in order.sequence:
        factors = touching[v]
        buckets[v] = factors
        for f in factors:
            for u in f.scope:
                if u != v:
                    touching[u] = [g for g in touching[u] if g is not f]
        groups = _deal(v, factors, unary, table_cells)
        shifts = _matched(v, unary[v], groups, workshop)
        for group, shifted in zip(groups, shifts, strict=True):
            left: Eliminated = workshop.eliminate(v, shifted, group)
            width = max(width, len(left.neighbours))
            cells += left.cells
            if not left.neighbours:
                constant += float(left.table)
                continue
            made = Factor(left.neighbours, left.maps, left.table)
            for u in left.neighbours:
                touching[u].append(made)
    choice = [-1] * n
    for v in reversed(order.sequence):
        cost = unary[v].copy()
        for f in buckets[v]:
            cost += row(f, v, choice)
        choice[v] = int(np.argmin(cost))
    return constant, choice, width, cells


def _deal(v: int, factors: list[Factor], unary: list[Floats], table_cells: int) -> list[list[Factor]]:
    """First-fit of the factors of ``v``, widest first, into groups whose joint table fits."""
    groups: list[tuple[dict[int, int], list[Factor]]] = []
    for f in sorted(factors, key=lambda f: -f.table.size):
        classes = {u: m.count for u, m in zip(f.scope, f.maps, strict=True)}
        for have, members in groups:
            joint = dict(have)
            for u, c in classes.items():
                joint[u] = min(len(unary[u]), joint.get(u, 1) * c)
            size = 1
            for c in joint.values():
                size *= c
            if size <= table_cells:
                have.clear()
                have.update(joint)
                members.append(f)
                break
        else:
            groups.append((classes, [f]))
    return [members for _, members in groups] or [[]]


def _matched(v: int, unary: Floats, groups: list[list[Factor]], workshop: Workshop) -> list[Floats]:
    """Unary costs of ``v`` for each group: they sum to ``unary`` and make the groups' min-marginals equal."""
    if len(groups) == 1:
        return [unary]
    marginals = []
    for group in groups:
        best = np.zeros(unary.size)
        for f in group:  # the sum of the factors' own minima: a bound of the group's min-marginal, cheap to find
            axis = f.scope.index(v)
            others = tuple(a for a in range(f.table.ndim) if a != axis)
            best = best + f.table.min(axis=others)[f.maps[axis].index]
        marginals.append(best)
    finite = np.isfinite(unary)
    for m in marginals:
        finite &= np.isfinite(m)
    mean = sum(marginals) / len(groups)
    out: list[Floats] = []
    for i, m in enumerate(marginals):
        share = unary / len(groups) + np.where(finite, mean - m, 0.0)
        if i == len(groups) - 1:  # the last takes what is left, so that the sum is exact in floating point, nearly
            share = np.where(finite, unary - sum(out), share)
        out.append(share)
    return [np.where(np.isnan(s), np.inf, s) for s in out]


def settle(problem: Problem, choice: list[int]) -> list[int]:
    """Coordinate descent: each variable takes its best configuration until none wants to move."""
    choice = list(choice)
    touching: list[list[Factor]] = [[] for _ in problem.unary]
    for f in problem.factors:
        for v in f.scope:
            touching[v].append(f)
    moved = True
    while moved:
        moved = False
        for v, u in enumerate(problem.unary):
            cost = u.copy()
            for f in touching[v]:
                cost = cost + row(f, v, choice)
            c = int(np.argmin(cost))
            if cost[c] + 1e-12 * abs(cost[c]) < cost[choice[v]]:
                choice[v], moved = c, True
    return choice


def cut(problem: Problem, fits: Callable[[Order], bool], rng: np.random.Generator, turn: int) -> list[bool]:
    """Which variables stay free, so that minimising over them is exact and cheap; the rest is fixed.

    Variables are fixed, the most connected first and then at random, until the order of what is left fits.
    """
    n = len(problem.unary)
    degree = np.zeros(n)
    for f in problem.factors:
        for v in f.scope:
            degree[v] += np.log2(len(problem.unary[v]) + 1)
    ranking = list(np.argsort(-(degree + (rng.random(n) * degree.max() * 2 if turn else 0)), kind="stable"))
    low, high = 1, n
    while low < high:  # fixing more variables never makes the tables larger by much: bisect on how many
        middle = (low + high) // 2
        free = [True] * n
        for v in ranking[:middle]:
            free[int(v)] = False
        if fits(best_order(_conditioned_shape(problem, free), 1 << 62, ("size",))):
            high = middle
        else:
            low = middle + 1
    free = [True] * n
    for v in ranking[:low]:
        free[int(v)] = False
    return free


def _conditioned_shape(problem: Problem, free: list[bool]) -> Problem:
    """The factors among free variables only; enough to judge an order."""
    return Problem(
        [u if free[v] else u[:1] for v, u in enumerate(problem.unary)],
        [f for f in problem.factors if all(free[v] for v in f.scope)],
    )


def improve(problem: Problem, choice: list[int], free: list[bool]) -> tuple[list[int], int]:
    """Best choice of the free variables, the others keeping theirs; and the cells evaluated."""
    numbers = [v for v in range(len(choice)) if free[v]]
    local = {v: i for i, v in enumerate(numbers)}
    unary = [problem.unary[v].copy() for v in numbers]
    factors = []
    for f in problem.factors:
        inside = [v for v in f.scope if free[v]]
        if len(inside) == len(f.scope):
            factors.append(Factor(tuple(local[v] for v in f.scope), f.maps, f.table))
        elif inside:  # factors of a compiled problem are pairs, so exactly one end is free
            unary[local[inside[0]]] += row(f, inside[0], choice)
    rest = Problem(unary, factors)
    out = solve(rest, best_order(rest, 1 << 62, ("size",)).sequence, Workshop())
    better = list(choice)
    for v, c in zip(numbers, out.choice, strict=True):
        better[v] = c
    return better, out.cells
