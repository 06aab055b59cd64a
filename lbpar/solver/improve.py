"""Good choices for graphs that are too wide for exact elimination.

A choice is improved by fixing some variables at their present values and minimising over all the others exactly, for many
different sets of fixed variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lbpar.solver.exact import solve_within
from lbpar.solver.factors import Floats, Problem
from lbpar.solver.order import Order, plan_order

ROUNDS = 24  # sets of fixed variables tried
PATIENCE = 8  # of them in a row without gain, after which the improvement stops


def descend(
    problem: Problem, choice: Sequence[int], memory: Sequence[Floats] | None = None, limit: float = 0.0
) -> list[int]:
    """Let each variable take its best configuration until none wants to move, the sum of ``memory`` staying within ``limit``."""
    choice, moved = list(choice), True
    used = sum(m[c] for m, c in zip(memory, choice, strict=True)) if memory else 0.0
    while moved:
        moved = False
        for v, c in enumerate(choice):
            cost = problem.costs(v, choice)
            allowed = cost
            if memory:
                fits = used - memory[v][c] + memory[v] <= limit
                fits[c] = True
                allowed = np.where(fits, cost, np.inf)
            best = int(np.argmin(allowed))
            if cost[best] + 1e-12 * abs(cost[best]) < cost[c]:
                used += memory[v][best] - memory[v][c] if memory else 0.0
                choice[v], moved = best, True
    return choice


def improve(
    problem: Problem, choice: Sequence[int], bound: float, fits: Callable[[Order], bool]
) -> tuple[list[int], int]:
    """A choice that is better where one is found, and the cells evaluated; the same each time.

    Stops early where the total reaches ``bound``. ``fits`` says of which orders the tables may be made.
    """
    choice, cells = descend(problem, choice), 0
    total, idle = problem.total(choice), 0
    rng = np.random.default_rng(0)
    for turn in range(ROUNDS):
        if idle >= PATIENCE or total <= bound:
            break
        free = _free(problem, fits, rng, turn)
        kept = [np.arange(u.size) if free[v] else np.array([choice[v]]) for v, u in enumerate(problem.unary)]
        found = solve_within(problem, kept, fits)
        idle += 1
        if found is not None:
            cells += found.cells
            if found.total + 1e-12 * abs(found.total) < total:
                choice, total, idle = found.choice, found.total, 0
    return choice, cells


def _free(problem: Problem, fits: Callable[[Order], bool], rng: np.random.Generator, turn: int) -> list[bool]:
    """Which variables stay free, so that minimising over them is exact and cheap; the rest is fixed.

    Variables are fixed, the most connected first and then at random, until the order of what is left fits.
    """
    n = len(problem.unary)
    degree = np.array([len(problem.touching[v]) * np.log2(len(u) + 1) for v, u in enumerate(problem.unary)])
    ranking = np.argsort(-(degree + (rng.random(n) * degree.max() * 2 if turn else 0)), kind="stable")
    low, high = 1, n
    while low < high:  # fixing more variables never makes the tables larger by much: bisect on how many
        middle = (low + high) // 2
        free = set(ranking[middle:].tolist())
        unary = [u if v in free else u[:1] for v, u in enumerate(problem.unary)]
        if fits(plan_order(Problem(unary, [f for f in problem.factors if free.issuperset(f.scope)]))):
            high = middle
        else:
            low = middle + 1
    return [v in set(ranking[low:].tolist()) for v in range(n)]
